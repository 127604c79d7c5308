-- A page of producers in the order of their names, or one producer.
--
-- ARGV[1]  cursor: go on after this name; '' from the start
-- ARGV[2]  limit: how many at most
-- ARGV[3]  producer_id: only this one, or ''
-- ARGV[4]  as_tenant: only what this tenant may see; '' for all
-- Calls    member_rows
-- Result   {'ok', rows}
--            row {producer_id, silent_us, node, domain, gpu_uuid, model, endpoint, transport,
--                 slab_bytes, offered_bytes, leased_bytes, grantable, queue_length,
--                 memory_total_bytes}
-- @flags no-writes

return {'ok', member_rows(ARGV, KEY.producers, KEY.producers_of, KEY.producers_seen, KEY.producer,
  'node', 'domain', 'gpu_uuid', 'model', 'endpoint', 'transport', 'slab_bytes', 'offered_bytes',
  'leased_bytes', 'grantable', 'queue_length', 'memory_total_bytes')}
