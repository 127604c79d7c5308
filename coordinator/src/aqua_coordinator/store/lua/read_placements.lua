-- The placer's plan in force.
--
-- Result   {'ok', plan_hash, {consumer_id, producers, ...}, {consumer_id, reason, ...}}
-- @flags no-writes

return {'ok', redis.call('HGET', KEYS[1], 'plan_hash') or '',
  redis.call('HGETALL', KEY.placements), redis.call('HGETALL', KEY.placement_reasons)}
