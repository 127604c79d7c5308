-- A page of reclaims in the order they were opened, or one reclaim.
--
-- ARGV[1]  cursor: go on after this position; '' from the start
-- ARGV[2]  limit: how many at most
-- ARGV[3]  reclaim_id: only this one, or ''
-- Calls    reclaim_row
-- Result   {'ok', rows, next}: see reclaim_row; where to go on, '' at the end
-- @flags no-writes

local rows = {}
if ARGV[3] ~= '' then
  return {'ok', {reclaim_row(ARGV[3])}, ''}
end
local names = redis.call('ZRANGEBYSCORE', KEY.reclaims, ARGV[1] == '' and '-inf' or '(' .. ARGV[1],
  '+inf', 'WITHSCORES', 'LIMIT', 0, tonumber(ARGV[2]))
for index = 1, #names, 2 do
  rows[#rows + 1] = reclaim_row(names[index])
end
return {'ok', rows, #names == 2 * tonumber(ARGV[2]) and names[#names] or ''}
