-- Replace the placer's plan as a whole.
--
-- ARGV[1]  plan: a PlacementPlan as JSON
-- Calls    enlist, emit
-- Result   {'ok', pairings}: how many

local plan = cjson.decode(ARGV[1])
redis.call('DEL', KEY.placements, KEY.placement_reasons, KEY.placement_names)
for _, pairing in ipairs(plan.pairings) do
  enlist(KEY.placement_names, pairing.consumer_id, 0)
  redis.call('HSET', KEY.placements, pairing.consumer_id, table.concat(pairing.producers, ' '))
  if pairing.reason ~= '' then
    redis.call('HSET', KEY.placement_reasons, pairing.consumer_id, pairing.reason)
  end
end
redis.call('HSET', KEYS[1], 'plan_hash', plan.plan_hash,
  'planned', #plan.pairings > 0 and '1' or '0')
emit(KIND.placement_changed)
return {'ok', #plan.pairings}
