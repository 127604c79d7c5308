-- The books as a whole: counts, and sums over a part of the members, the parts one after the other.
--
-- ARGV[1]  producers_after: go on after this name; '' from the start
-- ARGV[2]  consumers_after: the same
-- ARGV[3]  limit: how many of each role at most
-- Calls    whole, counts_in
-- Result   {'ok', books_id, {what, count, ...}, {what, sum, ...}, producers_after,
--           consumers_after}: where to go on, the last names again at the end
--            counts: all members, silence_us of the one heard longest ago, open reclaims, leases
--                    that are rightful, records set aside since the books were made, and how long
--                    the clock stood, stood_{reason}_us; whether there are quotas, 1 or 0
--            sums: what the part's members offer, have on lease, and want, and their leases by
--                  state, those in the initial one left out
-- @flags no-writes

local sums = {}
local function sum(what, value)
  sums[what] = (sums[what] or 0) + (whole(value) or 0)
end

-- Where to go on after adding up these fields of a page of members.
local function add_up(after, index, prefix, ...)
  local names = redis.call('ZRANGEBYLEX', index, after == '' and '-' or '(' .. after, '+',
    'LIMIT', 0, tonumber(ARGV[3]))
  for _, name in ipairs(names) do
    local row = redis.call('HMGET', prefix .. name, ...)
    for position, field in ipairs({...}) do
      if field == 'states' then
        for state, number in pairs(counts_in(row[position])) do
          sum(state, number)
        end
      else
        sum(field, row[position])
      end
    end
  end
  return names[#names] or after
end

local counts = {}
local function count(what, number)
  counts[#counts + 1] = what
  counts[#counts + 1] = number
end

for _, reason in ipairs({'absence', 'refusal', 'silence'}) do
  count('stood_' .. reason .. '_us',
    whole(redis.call('HGET', KEYS[1], 'stood_' .. reason .. '_us')) or 0)
end
count('quarantined', whole(redis.call('HGET', KEYS[1], 'quarantined')) or 0)
count('quotas', has_quotas and 1 or 0)
count('rightful', redis.call('ZCARD', KEY.deadlines))
count('reclaims', redis.call('ZCARD', KEY.reclaims) - redis.call('ZCARD', KEY.ended_reclaims))
for role, keys in pairs({
  producer = {KEY.producers, KEY.producers_seen}, consumer = {KEY.consumers, KEY.consumers_seen},
}) do
  local oldest = redis.call('ZRANGE', keys[2], 0, 0, 'WITHSCORES')
  count(role, redis.call('ZCARD', keys[1]))
  count(role .. '_silence_us', oldest[2] and clock_us - tonumber(oldest[2]) or 0)
end
local producers_after = add_up(ARGV[1], KEY.producers, KEY.producer,
  'offered_bytes', 'leased_bytes', 'queue_length', 'states')
local consumers_after = add_up(ARGV[2], KEY.consumers, KEY.consumer,
  'wanted_bytes', 'spilled_bytes')
local flat = {}
for what, total in pairs(sums) do
  flat[#flat + 1] = what
  flat[#flat + 1] = total
end
return {'ok', books_id, counts, flat, producers_after, consumers_after}
