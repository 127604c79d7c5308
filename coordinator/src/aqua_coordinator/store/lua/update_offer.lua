-- Change a producer's offer between two reports; ordered by the same revision.
--
-- ARGV[1]  producer_id
-- ARGV[2]  update: an OfferUpdate as JSON
-- ARGV[3]  as_tenant: whose the caller's token is, or ''
-- Calls    offer_of, member_of, why_not_for, integer, refuse, why_stale, leases_on, emit, step,
--          save
-- Result   {'ok', producer_id, domain, offered_bytes, leased_bytes, grantable (1 or 0)}
-- Refuses  unknown_resource, stale_revision, request_invalid

local producer_id, update = ARGV[1], cjson.decode(ARGV[2])
local incarnation, revision, offered = update.incarnation, update.revision, update.offered_bytes
local key = KEY.producer .. producer_id
local offer = offer_of(producer_id)
local known = member_of(key)
local fingerprint = 'offer ' .. integer(offered)
local refusal = why_not_for(known, 'producer', producer_id, ARGV[3])
if refusal then
  return refusal
end
if known.incarnation ~= incarnation then
  return refuse('stale_revision', 'the offer is of another life of this producer',
    'producer_id', producer_id, 'incarnation', incarnation)
end
refusal = why_stale(known, producer_id, incarnation, revision, fingerprint)
if refusal then
  return refusal
end
if offered % known.slab_bytes ~= 0 then
  return refuse('request_invalid', 'offered_bytes must be a multiple of slab_bytes',
    'slab_bytes', integer(known.slab_bytes))
end

local granted, held = {}, offer.unproven
for _, lease in ipairs(leases_on(KEY.producer_leases, 'producer_id', producer_id, true)) do
  if lease.state == STATE.granted then
    granted[#granted + 1] = lease
  else
    held = held + lease.bytes
  end
end
if held > offered then
  return refuse('request_invalid', 'slabs that are lent stay under the offer until they are back',
    'held_bytes', integer(held))
end

redis.call('HSET', key, 'revision', integer(revision), 'fingerprint', fingerprint)
if offer.offered ~= offered then
  emit(KIND.offer_changed, producer_id, nil, nil, nil, offered)
end
offer.offered = offered
offer.changed = true
for _, lease in ipairs(granted) do
  if offer.leased > offered then
    step(lease, EVENT.reclaim, 'withdrawn')
    save(lease)
  end
end
return {'ok', producer_id, offer.domain, offer.offered, offer.leased, offer.grantable and 1 or 0}
