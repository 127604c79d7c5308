-- Remember the sums over all members, for who looks back, unless that was done a moment ago.
--
-- ARGV[1]  sums: offered_bytes, leased_bytes, wanted_bytes and spilled_bytes, as words
-- Calls    whole, integer
-- Result   {'ok'}
--
-- Any number of coordinators may do so: what the first of them says is kept.

local since_us = now_us - (whole(redis.call('HGET', KEYS[1], 'sampled_us')) or 0)
if since_us >= CONST.sample_us or since_us < 0 then
  redis.call('XADD', KEY.samples, 'MAXLEN', '~', CONST.max_samples, '*', 'sums', ARGV[1])
  redis.call('HSET', KEYS[1], 'sampled_us', integer(now_us))
end
return {'ok'}
