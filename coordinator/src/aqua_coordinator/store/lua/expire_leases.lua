-- One step of the sweep: leases past their deadline expire.
--
-- ARGV[1]  limit: how many leases at most
-- Calls    integer, load_leases, lease_of, step, save, set_aside, strike
-- Result   {'ok', handled}: how many

local overdue = redis.call('ZRANGEBYSCORE', KEY.deadlines, '-inf', integer(clock_us),
  'LIMIT', 0, tonumber(ARGV[1]))
load_leases(overdue)
for _, lease_id in ipairs(overdue) do
  local lease = lease_of(lease_id)
  if lease and step(lease, EVENT.expire, 'expired') then
    save(lease)
  else
    set_aside(KEY.deadlines, lease_id .. ' has a deadline, and no right')
    strike(KEY.deadlines, lease_id)
  end
end
return {'ok', #overdue}
