-- Replace the placer's plan as a whole.
--
-- KEYS[1]  the books
-- ARGV[1]  plan_hash
-- ARGV[2...]  consumer_id, its producers (best first, separated by spaces), the reason; repeated
-- Result   {'ok', pairings}

redis.call('DEL', KEY.placements, KEY.placement_reasons)
for index = 2, #ARGV, 3 do
  redis.call('HSET', KEY.placements, ARGV[index], ARGV[index + 1])
  if ARGV[index + 2] ~= '' then
    redis.call('HSET', KEY.placement_reasons, ARGV[index], ARGV[index + 2])
  end
end
redis.call('HSET', KEYS[1], 'plan_hash', ARGV[1], 'planned', #ARGV > 1 and '1' or '0')
emit(KIND.placement_changed)
return {'ok', (#ARGV - 1) / 3}
