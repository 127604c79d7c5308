-- Book bytes of one producer for one consumer.
--
-- ARGV[1]  request: a LeaseRequest as JSON, without nulls
-- ARGV[2]  idempotency_key
-- ARGV[3]  attach_window_s, in microseconds
-- ARGV[4]  seed: random, what the lease's id is drawn from
-- ARGV[5]  as_tenant: whose the caller's token is, or ''
-- Calls    first_answer, refuse, is_name, is_visible, headroom, over_quota, borrowed_by_others,
--          pairing_of, terms_of, lender, size_of, integer, next_epoch, draw_id, open_lease,
--          list_lease, book, set_deadline, save, keep_answer
-- Result   {'ok', books_id, answer}: answer is these, by line feeds (an endpoint may hold some)
--            lease_id, epoch, producer_id, incarnation, consumer_id, bytes, expires_in_us,
--            not_after_us (Redis time), transport, slab_bytes, endpoint
-- Refuses  idempotency_conflict, unknown_resource, books_rebuilding, capacity_exhausted,
--          quota_exceeded
--
-- A repeated key is answered with the words of the first time; a refusal is not kept, since a
-- retry may find memory.

-- A key is its tenant's: no other gets the answer by it.
local as_tenant = ARGV[5] or ''
local idempotency_key = KEY.idempotency .. 'lease:' .. (as_tenant ~= '' and as_tenant .. ' ' or '')
  .. ARGV[2]
local first, conflict = first_answer(idempotency_key, ARGV[1])
if conflict then
  return conflict
elseif first then
  return {'ok', books_id, first}
end

local request = cjson.decode(ARGV[1])
local consumer_id, bytes = request.consumer_id, request.bytes
local least = request.min_bytes or bytes

local known = redis.call('HMGET', KEY.consumer .. consumer_id, 'domain', 'avoided', 'tenant',
  'leased_bytes')
local domain, tenant = known[1], known[3] or ''
if not is_name(domain) or not is_visible(tenant, as_tenant) then
  return refuse('unknown_resource', 'consumer ' .. consumer_id .. ' has not reported yet',
    'consumer_id', consumer_id)
end

local room = headroom(tenant, consumer_id, known[4], bytes)
if room and room.bytes < least then
  return over_quota(room, least)
end
bytes = room and math.min(bytes, room.bytes) or bytes

local pairing = pairing_of(consumer_id)
local terms = terms_of(request, known[2])
local producer_id, offer = lender(domain, pairing, bytes, least, terms)
if not producer_id then
  if redis.call('SCARD', KEY.unconfirmed .. domain) > 0 then
    return refuse('books_rebuilding', 'producers have yet to confirm the books', 'domain', domain)
  end
  return refuse('capacity_exhausted', 'no producer of the domain can lend that much now',
    'domain', domain, 'available_bytes', integer(offer), 'paired', pairing and 'yes' or 'no',
    'ruled_out_count', integer(terms.ruled_out),
    'borrowed_bytes', integer(borrowed_by_others(room, least)))
end
if size_of(KEY.producer_leases .. producer_id) >= CONST.max_leases_per_member
    or size_of(KEY.consumer_leases .. consumer_id) >= CONST.max_leases_per_member then
  return refuse('capacity_exhausted', 'a member holds as many leases as a report can carry',
    'producer_id', producer_id, 'consumer_id', consumer_id)
end

local free = offer.offered - offer.leased
local granted = math.min(free, math.ceil(bytes / offer.slab_bytes) * offer.slab_bytes)
if room and granted > room.bytes then
  granted = math.floor(room.bytes / offer.slab_bytes) * offer.slab_bytes
  if granted < least then
    return over_quota(room, math.ceil(least / offer.slab_bytes) * offer.slab_bytes)
  end
end
local granted_epoch = next_epoch()
local lease = open_lease({
  lease_id = draw_id(KEY.lease, 'lease-', ARGV[4]), state = CONST.initial_state,
  epoch = granted_epoch, granted_epoch = granted_epoch, producer_id = producer_id,
  consumer_id = consumer_id, ttl_us = math.floor(request.ttl_s * 1000000 + 0.5),
  granted_bytes = granted, tenant = tenant,
})
list_lease(lease)
book(lease, granted)
local attach_us = tonumber(ARGV[3])
set_deadline(lease, clock_us + attach_us)
save(lease)

local answer = table.concat({
  lease.lease_id, integer(granted_epoch), producer_id, offer.incarnation, consumer_id,
  integer(granted), integer(attach_us), integer(now_us + attach_us), offer.transport,
  integer(offer.slab_bytes), offer.endpoint,
}, '\n')
keep_answer(idempotency_key, ARGV[1], answer)
return {'ok', books_id, answer}
