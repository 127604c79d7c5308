-- The consumer gives up its right. Harmless when repeated, under any epoch the lease has had.
--
-- ARGV[1]  lease_id
-- ARGV[2]  epoch
-- ARGV[3]  as_consumer: whom the caller's token is bound to, or ''
-- ARGV[4]  failure: why it could not be attached, or ''
-- ARGV[5]  voice: the caller's token; '' where there are no tokens
-- ARGV[6]  as_tenant: whose the caller's token is, or ''
-- Calls    lease_of, why_not_act, note_failure, step, save, lease_row
-- Result   {'ok', row}, see lease_row
-- Refuses  unknown_resource, forbidden, stale_epoch

local lease = lease_of(ARGV[1])
local refusal = why_not_act(lease, ARGV[1], ARGV[3], tonumber(ARGV[2]), ARGV[6])
if refusal then
  return refusal
end
if (ARGV[4] or '') ~= '' then
  note_failure(lease, ARGV[4], ARGV[5])
end
-- The table lets a lease of any state be released.
step(lease, EVENT.release, 'released')
save(lease)
return {'ok', lease_row(lease)}
