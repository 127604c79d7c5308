-- Who may act on a lease: the right consumer, under an epoch that the books have issued for it.

-- The refusal, or nil. `as_consumer` is '' unless the caller's token is bound to a consumer.
local function why_not_act(lease, lease_id, as_consumer, named_epoch, as_tenant)
  if not lease or not is_visible(lease.tenant, as_tenant) then
    return refuse('unknown_resource', 'there is no lease ' .. lease_id, 'lease_id', lease_id)
  end
  if as_consumer ~= '' and lease.consumer_id ~= as_consumer then
    return refuse('forbidden', 'this token is bound to another consumer', 'lease_id', lease_id)
  end
  if named_epoch < lease.granted_epoch or named_epoch > lease.epoch then
    return refuse('stale_epoch', 'the lease never had this epoch', 'lease_id', lease_id,
      'epoch', integer(named_epoch))
  end
  return nil
end
