-- A page of reclaims in the order they were opened, or one reclaim.
--
-- ARGV[1]  cursor: go on after this position; '' from the start
-- ARGV[2]  limit: how many at most
-- ARGV[3]  reclaim_id: only this one, or ''
-- ARGV[4]  as_tenant: only what this tenant may see; '' for all
-- Calls    reclaim_row, offer_of, is_visible
-- Result   {'ok', rows, next}: see reclaim_row; where to go on, '' at the end
-- @flags no-writes

local function shown(reclaim_id)
  local row = reclaim_row(reclaim_id)
  return row and is_visible(offer_of(row[2]).tenant, ARGV[4]) and row or nil
end

local rows = {}
if ARGV[3] ~= '' then
  return {'ok', {shown(ARGV[3])}, ''}
end
local names = redis.call('ZRANGEBYSCORE', KEY.reclaims, ARGV[1] == '' and '-inf' or '(' .. ARGV[1],
  '+inf', 'WITHSCORES', 'LIMIT', 0, tonumber(ARGV[2]))
for index = 1, #names, 2 do
  rows[#rows + 1] = shown(names[index])
end
return {'ok', rows, #names == 2 * tonumber(ARGV[2]) and names[#names] or ''}
