-- A page of producers in the order of their names, or one producer.
--
-- KEYS[1]  the books
-- ARGV[1]  cursor: go on after this name; '' from the start
-- ARGV[2]  limit: how many at most
-- ARGV[3]  producer_id: only this one, or ''
-- Result   {'ok', rows}
--            row {producer_id, silent_us, node, domain, gpu_uuid, model, endpoint, transport,
--                 slab_bytes, offered_bytes, leased_bytes, grantable, queue_length}
-- @flags no-writes

local names = {ARGV[3]}
if ARGV[3] == '' then
  names = redis.call('ZRANGEBYLEX', KEY.producers, ARGV[1] == '' and '-' or '(' .. ARGV[1], '+',
    'LIMIT', 0, tonumber(ARGV[2]))
end
local rows = {}
for _, name in ipairs(names) do
  local seen_us = redis.call('ZSCORE', KEY.producers_seen, name)
  if seen_us then
    local row = redis.call('HMGET', KEY.producer .. name, 'node', 'domain', 'gpu_uuid', 'model',
      'endpoint', 'transport', 'slab_bytes', 'offered_bytes', 'leased_bytes', 'grantable',
      'queue_length')
    table.insert(row, 1, clock_us - tonumber(seen_us))
    table.insert(row, 1, name)
    rows[#rows + 1] = row
  end
end
return {'ok', rows}
