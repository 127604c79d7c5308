-- Book bytes of one producer for one consumer.
--
-- ARGV[1]  request: a LeaseRequest as JSON, without nulls
-- ARGV[2]  idempotency_key
-- ARGV[3]  attach_window_s, in microseconds
-- Calls    first_answer, refuse, pairing_of, fitting, largest, size_of, integer, offer_of, next_epoch,
--          open_lease, list_lease, book, set_deadline, save, keep_answer
-- Result   {'ok', books_id, answer}: answer is these, by line feeds (an endpoint may hold some)
--            lease_id, epoch, producer_id, incarnation, consumer_id, bytes, expires_in_us,
--            not_after_us (Redis time), transport, slab_bytes, endpoint
-- Refuses  idempotency_conflict, unknown_resource, books_rebuilding, capacity_exhausted
--
-- A repeated key is answered with the words of the first time; a refusal is not kept, since a
-- retry may find memory.

local idempotency_key = KEY.idempotency .. 'lease:' .. ARGV[2]
local first, conflict = first_answer(idempotency_key, ARGV[1])
if conflict then
  return conflict
elseif first then
  return {'ok', books_id, first}
end

local request = cjson.decode(ARGV[1])
local consumer_id, bytes = request.consumer_id, request.bytes
local least = request.min_bytes or bytes

local domain = redis.call('HGET', KEY.consumer .. consumer_id, 'domain')
if not domain then
  return refuse('unknown_resource', 'consumer ' .. consumer_id .. ' has not reported yet',
    'consumer_id', consumer_id)
end

local pairing = pairing_of(consumer_id)
local producer_id = fitting(domain, pairing, bytes)
if not producer_id then
  local roomiest, most = largest(domain, pairing)
  if not roomiest or most < least then
    if redis.call('SCARD', KEY.unconfirmed .. domain) > 0 then
      return refuse('books_rebuilding', 'producers have yet to confirm the books',
        'domain', domain)
    end
    return refuse('capacity_exhausted', 'no producer of the domain can lend that much now',
      'domain', domain, 'available_bytes', integer(most), 'paired', pairing and 'yes' or 'no')
  end
  producer_id = roomiest
end
if size_of(KEY.producer_leases .. producer_id) >= CONST.max_leases_per_member
    or size_of(KEY.consumer_leases .. consumer_id) >= CONST.max_leases_per_member then
  return refuse('capacity_exhausted', 'a member holds as many leases as a report can carry',
    'producer_id', producer_id, 'consumer_id', consumer_id)
end

local offer = offer_of(producer_id)
local free = offer.offered - offer.leased
local whole = math.min(free, math.ceil(bytes / offer.slab_bytes) * offer.slab_bytes)
assert(whole > 0 and whole >= least, 'a grant of ' .. whole .. ' from ' .. free)

local granted_epoch = next_epoch()
local lease = open_lease({
  lease_id = 'lease-' .. integer(granted_epoch), state = CONST.initial_state,
  epoch = granted_epoch, granted_epoch = granted_epoch, producer_id = producer_id,
  consumer_id = consumer_id, ttl_us = math.floor(request.ttl_s * 1000000 + 0.5),
})
list_lease(lease)
book(lease, whole)
local attach_us = tonumber(ARGV[3])
set_deadline(lease, clock_us + attach_us)
save(lease)

local answer = table.concat({
  lease.lease_id, integer(granted_epoch), producer_id, offer.incarnation, consumer_id,
  integer(whole), integer(attach_us), integer(now_us + attach_us), offer.transport,
  integer(offer.slab_bytes), offer.endpoint,
}, '\n')
keep_answer(idempotency_key, ARGV[1], answer)
return {'ok', books_id, answer}
