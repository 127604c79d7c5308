-- A page of consumers in the order of their names, or one consumer.
--
-- ARGV[1]  cursor: go on after this name; '' from the start
-- ARGV[2]  limit: how many at most
-- ARGV[3]  consumer_id: only this one, or ''
-- Calls    member_rows
-- Result   {'ok', rows}
--            row {consumer_id, silent_us, node, domain, gpu_uuid, model, wanted_bytes,
--                 spilled_bytes, leased_bytes}
-- @flags no-writes

local rows = member_rows(ARGV, KEY.consumers, KEY.consumers_seen, KEY.consumer,
  'node', 'domain', 'gpu_uuid', 'model', 'wanted_bytes', 'spilled_bytes')
for _, row in ipairs(rows) do
  local held = redis.call('ZRANGE', KEY.consumer_leases .. row[1], 0, -1, 'WITHSCORES')
  local leased = 0
  for index = 2, #held, 2 do
    leased = leased + tonumber(held[index])
  end
  row[#row + 1] = leased
end
return {'ok', rows}
