-- A page of consumers in the order of their names, or one consumer.
--
-- KEYS[1]  the books
-- ARGV[1]  cursor: go on after this name; '' from the start
-- ARGV[2]  limit: how many at most
-- ARGV[3]  consumer_id: only this one, or ''
-- Result   {'ok', rows}
--            row {consumer_id, silent_us, leased_bytes, node, domain, gpu_uuid, model,
--                 wanted_bytes, spilled_bytes}
-- @flags no-writes

local names = {ARGV[3]}
if ARGV[3] == '' then
  names = redis.call('ZRANGEBYLEX', KEY.consumers, ARGV[1] == '' and '-' or '(' .. ARGV[1], '+',
    'LIMIT', 0, tonumber(ARGV[2]))
end
local rows = {}
for _, name in ipairs(names) do
  local seen_us = redis.call('ZSCORE', KEY.consumers_seen, name)
  if seen_us then
    local leased = 0
    local held = redis.call('ZRANGE', KEY.consumer_leases .. name, 0, -1, 'WITHSCORES')
    for index = 2, #held, 2 do
      leased = leased + tonumber(held[index])
    end
    local row = redis.call('HMGET', KEY.consumer .. name, 'node', 'domain', 'gpu_uuid', 'model',
      'wanted_bytes', 'spilled_bytes')
    table.insert(row, 1, leased)
    table.insert(row, 1, clock_us - tonumber(seen_us))
    table.insert(row, 1, name)
    rows[#rows + 1] = row
  end
end
return {'ok', rows}
