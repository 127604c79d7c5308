-- Keep a model's profile; the one before is replaced.
--
-- ARGV[1]  model
-- ARGV[2]  profile: a ModelProfile as JSON
-- Calls    refuse
-- Result   {'ok'}
-- Refuses  capacity_exhausted

if redis.call('HEXISTS', KEY.profiles, ARGV[1]) == 0
    and redis.call('HLEN', KEY.profiles) >= CONST.max_profiles then
  return refuse('capacity_exhausted', 'no more than ' .. CONST.max_profiles .. ' models are kept')
end
redis.call('HSET', KEY.profiles, ARGV[1], ARGV[2])
return {'ok'}
