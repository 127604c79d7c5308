-- A page of consumers in the order of their names, or one consumer.
--
-- ARGV[1]  cursor: go on after this name; '' from the start
-- ARGV[2]  limit: how many at most
-- ARGV[3]  consumer_id: only this one, or ''
-- ARGV[4]  as_tenant: only what this tenant may see; '' for all
-- Calls    member_rows
-- Result   {'ok', rows}
--            row {consumer_id, silent_us, node, domain, gpu_uuid, model, wanted_bytes,
--                 spilled_bytes, leased_bytes}
-- @flags no-writes

return {'ok', member_rows(ARGV, KEY.consumers, KEY.consumers_of, KEY.consumers_seen, KEY.consumer,
  'node', 'domain', 'gpu_uuid', 'model', 'wanted_bytes', 'spilled_bytes', 'leased_bytes')}
