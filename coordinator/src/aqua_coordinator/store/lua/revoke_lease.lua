-- An operator ends the right to a lease. Its bytes stay booked until the producer has them back.
--
-- ARGV[1]  lease_id
-- ARGV[2]  epoch
-- Calls    lease_of, why_not_act, step, refuse, save, lease_row
-- Result   {'ok', row}, see lease_row
-- Refuses  unknown_resource, stale_epoch, invalid_transition

local lease = lease_of(ARGV[1])
local refusal = why_not_act(lease, ARGV[1], '', tonumber(ARGV[2]))
if refusal then
  return refusal
end
if not step(lease, EVENT.revoke, 'revoked') then
  return refuse('invalid_transition', 'a lease that is ' .. lease.state .. ' cannot be revoked',
    'lease_id', ARGV[1], 'state', lease.state)
end
save(lease)
return {'ok', lease_row(lease)}
