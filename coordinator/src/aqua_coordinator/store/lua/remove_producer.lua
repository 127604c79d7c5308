-- A producer takes its leave. Refused while slabs are out: they would be lost to the books.
--
-- ARGV[1]  producer_id
-- ARGV[2]  incarnation
-- ARGV[3]  as_tenant: whose the caller's token is, or ''
-- Calls    member_of, why_not_for, refuse, leases_on, step, save, settle, forget_producer
-- Result   {'ok'}
-- Refuses  unknown_resource, stale_revision, invalid_transition

local producer_id, incarnation = ARGV[1], ARGV[2]
local known = member_of(KEY.producer .. producer_id)
local refusal = why_not_for(known, 'producer', producer_id, ARGV[3])
if refusal then
  return refusal
end
if known.incarnation ~= incarnation then
  return refuse('stale_revision', 'another life of this producer is in the books',
    'producer_id', producer_id, 'incarnation', incarnation)
end
local booked = leases_on(KEY.producer_leases, 'producer_id', producer_id)
for _, lease in ipairs(booked) do
  if lease.state ~= STATE.granted then
    return refuse('invalid_transition', 'consumers still hold slabs of this producer',
      'producer_id', producer_id, 'lease_id', lease.lease_id, 'state', lease.state)
  end
end
for _, lease in ipairs(booked) do
  step(lease, EVENT.reclaim, 'withdrawn')
  save(lease)
end
settle()
forget_producer(producer_id, known.domain)
return {'ok'}
