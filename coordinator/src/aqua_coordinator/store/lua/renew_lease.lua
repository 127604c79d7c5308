-- Start a lease's time to live anew.
--
-- ARGV[1]  lease_id
-- ARGV[2]  epoch
-- ARGV[3]  ttl_s, in microseconds
-- ARGV[4]  as_consumer: whom the caller's token is bound to, or ''
-- ARGV[5]  as_tenant: whose the caller's token is, or ''
-- Calls    lease_of, why_not_act, refuse, step, write_lease, prolong, lease_row
-- Result   {'ok', row}, see lease_row
-- Refuses  unknown_resource, forbidden, stale_epoch, lease_lost, invalid_transition

local lease = lease_of(ARGV[1])
local named_epoch = tonumber(ARGV[2])
local refusal = why_not_act(lease, ARGV[1], ARGV[4], named_epoch, ARGV[5])
if refusal then
  return refusal
end
if named_epoch ~= lease.epoch then
  return refuse('stale_epoch', 'the right to the lease has ended: ' .. lease.reason,
    'lease_id', ARGV[1], 'state', lease.state)
end
if not BOOKED[lease.state] then
  return refuse('lease_lost', 'the lease has ended: ' .. lease.reason,
    'lease_id', ARGV[1], 'state', lease.state)
end
if not step(lease, EVENT.renew) then
  return refuse('invalid_transition', 'a lease that is ' .. lease.state .. ' cannot be renewed',
    'lease_id', ARGV[1], 'state', lease.state)
end
lease.ttl_us = tonumber(ARGV[3])
write_lease(lease)
if lease.state ~= STATE.granted then
  prolong(lease)
end
return {'ok', lease_row(lease)}
