-- An operator asks a producer to take memory back; the producer learns of it in its next answer.
--
-- KEYS[1]  the books
-- ARGV[1]  idempotency key
-- ARGV[2]  fingerprint of the request
-- ARGV[3]  producer_id
-- ARGV[4]  bytes
-- ARGV[5]  deadline_s
-- Result   {'ok', reclaim_id}
-- Refuses  idempotency_conflict, unknown_resource, request_invalid, capacity_exhausted

local idempotency_key = KEY.idempotency .. 'reclaim:' .. ARGV[1]
local first = redis.call('GET', idempotency_key)
if first then
  local cut = string.find(first, '\n', 1, true)
  if string.sub(first, 1, cut - 1) ~= ARGV[2] then
    return refuse('idempotency_conflict', 'this key came with a different request before')
  end
  return {'ok', string.sub(first, cut + 1)}
end

local producer_id, bytes = ARGV[3], tonumber(ARGV[4])
local offered = redis.call('HGET', KEY.producer .. producer_id, 'offered_bytes')
if not offered then
  return refuse('unknown_resource', 'there is no producer ' .. producer_id,
    'producer_id', producer_id)
end
if bytes > tonumber(offered) then
  return refuse('request_invalid', 'a producer cannot take back more than it offers',
    'offered_bytes', offered)
end
if redis.call('ZCARD', KEY.producer_reclaims .. producer_id) >= CONST.max_open_reclaims then
  return refuse('capacity_exhausted', 'the producer has as many reclaims open as it can report',
    'producer_id', producer_id)
end

local order = integer(next_epoch())
local reclaim_id = 'reclaim-' .. order
redis.call('HSET', KEY.reclaim .. reclaim_id, 'producer_id', producer_id, 'origin', 'operator',
  'order', order, 'done', '0', 'taken_up', '0', 'requested_bytes', ARGV[4], 'returned_bytes', '0',
  'deadline_s', ARGV[5], 'escalated', '0', 'first_slab_ms', '', 'total_ms', '')
redis.call('ZADD', KEY.reclaims, order, reclaim_id)
redis.call('ZADD', KEY.producer_reclaims .. producer_id, order, reclaim_id)
redis.call('SET', idempotency_key, ARGV[2] .. '\n' .. reclaim_id, 'PX', CONST.idempotency_ttl_ms)
emit(KIND.reclaim_opened, producer_id, nil, nil, nil, bytes)
return {'ok', reclaim_id}
