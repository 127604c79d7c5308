-- An operator asks a producer to take memory back; the producer learns of it in its next answer.
--
-- ARGV[1]  request: a ReclaimRequest as JSON
-- ARGV[2]  idempotency_key
-- ARGV[3]  seed: random, what the reclaim's id is drawn from
-- Calls    first_answer, reclaim_row, refuse, offer_of, draw_id, integer, next_epoch, keep_answer,
--          emit
-- Result   {'ok', row}, see reclaim_row
-- Refuses  idempotency_conflict, unknown_resource, request_invalid, capacity_exhausted

local idempotency_key = KEY.idempotency .. 'reclaim:' .. ARGV[2]
local first, conflict = first_answer(idempotency_key, ARGV[1])
if conflict then
  return conflict
end
local row = first and reclaim_row(first)
if row then
  return {'ok', row}
end

local request = cjson.decode(ARGV[1])
local producer_id, bytes = request.producer_id, request.bytes
local offer = offer_of(producer_id)
if not offer.exists then
  return refuse('unknown_resource', 'there is no producer ' .. producer_id,
    'producer_id', producer_id)
end
if bytes > offer.offered then
  return refuse('request_invalid', 'a producer cannot take back more than it offers',
    'offered_bytes', integer(offer.offered))
end
if redis.call('ZCARD', KEY.producer_reclaims .. producer_id) >= CONST.max_open_reclaims then
  return refuse('capacity_exhausted', 'the producer has as many reclaims open as it can report',
    'producer_id', producer_id)
end

local order = integer(next_epoch())
local reclaim_id = draw_id(KEY.reclaim, 'reclaim-', ARGV[3])
redis.call('HSET', KEY.reclaim .. reclaim_id, 'producer_id', producer_id, 'origin', 'operator',
  'order', order, 'done', '0', 'taken_up', '0', 'requested_bytes', integer(bytes),
  'returned_bytes', '0', 'deadline_s', tostring(request.deadline_s), 'escalated', '0',
  'first_slab_ms', '', 'total_ms', '')
redis.call('ZADD', KEY.reclaims, order, reclaim_id)
redis.call('ZADD', KEY.producer_reclaims .. producer_id, order, reclaim_id)
keep_answer(idempotency_key, ARGV[1], reclaim_id)
emit(KIND.reclaim_opened, producer_id, nil, nil, nil, bytes, offer.tenant)
return {'ok', reclaim_row(reclaim_id)}
