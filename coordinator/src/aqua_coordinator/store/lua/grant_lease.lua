-- Book bytes of one producer for one consumer.
--
-- KEYS[1]  the books
-- ARGV[1]  idempotency key
-- ARGV[2]  fingerprint of the request
-- ARGV[3]  consumer_id
-- ARGV[4]  bytes wanted
-- ARGV[5]  the least that will do
-- ARGV[6]  time to live, in microseconds
-- ARGV[7]  time allowed for attaching, in microseconds
-- Result   {'ok', books_id, answer}: answer is these, by line feeds (an endpoint may hold some)
--            lease_id, epoch, producer_id, incarnation, consumer_id, bytes, expires_in_us,
--            not_after_us (Redis time), transport, slab_bytes, endpoint
-- Refuses  idempotency_conflict, unknown_resource, books_rebuilding, capacity_exhausted
--
-- A repeated key is answered with the words of the first time; a refusal is not kept, since a
-- retry may find memory.

local consumer_id = ARGV[3]
local bytes, least = tonumber(ARGV[4]), tonumber(ARGV[5])

local idempotency_key = KEY.idempotency .. 'lease:' .. ARGV[1]
local first = redis.call('GET', idempotency_key)
if first then
  local cut = string.find(first, '\n', 1, true)
  if string.sub(first, 1, cut - 1) ~= ARGV[2] then
    return refuse('idempotency_conflict', 'this key came with a different request before')
  end
  return {'ok', books_id, string.sub(first, cut + 1)}
end

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
  consumer_id = consumer_id, ttl_us = tonumber(ARGV[6]),
})
list_lease(lease)
book(lease, whole)
local attach_us = tonumber(ARGV[7])
set_deadline(lease, clock_us + attach_us)
save(lease)

local answer = table.concat({
  lease.lease_id, integer(granted_epoch), producer_id, offer.incarnation, consumer_id,
  integer(whole), integer(attach_us), integer(now_us + attach_us), offer.transport,
  integer(offer.slab_bytes), offer.endpoint,
}, '\n')
redis.call('SET', idempotency_key, ARGV[2] .. '\n' .. answer, 'PX', CONST.idempotency_ttl_ms)
return {'ok', books_id, answer}
