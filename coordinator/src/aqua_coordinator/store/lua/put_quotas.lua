-- Replace the quotas as a whole.
--
-- ARGV[1]  quotas: fields of the hash that lib/quota.lua describes, each before its value, as JSON
-- ARGV[2]  version: of the quotas, any text; '' when there are none
-- Result   {'ok'}

local words = cjson.decode(ARGV[1])
assert(type(words) == 'table' and #words % 2 == 0 and ARGV[2], 'quotas are fields and values')
redis.call('DEL', KEY.quotas)
for first = 1, #words, MAX_WORDS do
  redis.call('HSET', KEY.quotas, unpack(words, first, math.min(first + MAX_WORDS - 1, #words)))
end
redis.call('HSET', KEYS[1], 'quotas', ARGV[2])
return {'ok'}
