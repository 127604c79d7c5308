-- A page of reclaims in the order they were opened, or one reclaim.
--
-- KEYS[1]  the books
-- ARGV[1]  go on after this position; '' from the start
-- ARGV[2]  how many at most
-- ARGV[3]  only this one, or ''
-- Result   {'ok', next, rows}
--            row {reclaim_id, producer_id, origin, requested_bytes, returned_bytes, deadline_s,
--                 done, escalated, first_slab_ms, total_ms}
-- @flags no-writes

local function row_of(reclaim_id)
  local row = redis.call('HMGET', KEY.reclaim .. reclaim_id, 'producer_id', 'origin',
    'requested_bytes', 'returned_bytes', 'deadline_s', 'done', 'escalated', 'first_slab_ms',
    'total_ms')
  table.insert(row, 1, reclaim_id)
  return row[2] and row
end

local rows = {}
if ARGV[3] ~= '' then
  return {'ok', '', {row_of(ARGV[3]) or nil}}
end
local names = redis.call('ZRANGEBYSCORE', KEY.reclaims, ARGV[1] == '' and '-inf' or '(' .. ARGV[1],
  '+inf', 'WITHSCORES', 'LIMIT', 0, tonumber(ARGV[2]))
for index = 1, #names, 2 do
  rows[#rows + 1] = row_of(names[index]) or nil
end
return {'ok', #names == 2 * tonumber(ARGV[2]) and names[#names] or '', rows}
