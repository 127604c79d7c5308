-- A consumer takes its leave and gives up whatever right it still has.
--
-- ARGV[1]  consumer_id
-- ARGV[2]  incarnation
-- ARGV[3]  as_tenant: whose the caller's token is, or ''
-- Calls    member_of, why_not_for, refuse, leases_on, step, save, forget_consumer
-- Result   {'ok'}
-- Refuses  unknown_resource, stale_revision

local consumer_id, incarnation = ARGV[1], ARGV[2]
local known = member_of(KEY.consumer .. consumer_id)
local refusal = why_not_for(known, 'consumer', consumer_id, ARGV[3])
if refusal then
  return refusal
end
if known.incarnation ~= incarnation then
  return refuse('stale_revision', 'another life of this consumer is in the books',
    'consumer_id', consumer_id, 'incarnation', incarnation)
end
for _, lease in ipairs(leases_on(KEY.consumer_leases, 'consumer_id', consumer_id)) do
  step(lease, EVENT.release, 'released')
  save(lease)
end
forget_consumer(consumer_id)
return {'ok'}
