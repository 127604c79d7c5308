-- Replace the placer's plan as a whole.
--
-- ARGV[1]  plan: a PlacementPlan as JSON
-- Calls    enlist, emit
-- Result   {'ok', pairings}: how many

local plan, producers, reasons = cjson.decode(ARGV[1]), {}, {}
for _, pairing in ipairs(plan.pairings) do
  producers[#producers + 1] = {pairing.consumer_id, table.concat(pairing.producers, ' ')}
  if pairing.reason ~= '' then
    reasons[#reasons + 1] = {pairing.consumer_id, pairing.reason}
  end
end

redis.call('DEL', KEY.placements, KEY.placement_reasons, KEY.placement_names)
for _, words in ipairs(producers) do
  enlist(KEY.placement_names, words[1], 0)
  redis.call('HSET', KEY.placements, words[1], words[2])
end
for _, words in ipairs(reasons) do
  redis.call('HSET', KEY.placement_reasons, words[1], words[2])
end
redis.call('HSET', KEYS[1], 'plan_hash', plan.plan_hash,
  'planned', #plan.pairings > 0 and '1' or '0')
emit(KIND.placement_changed)
return {'ok', #plan.pairings}
