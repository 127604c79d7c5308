-- The first step of a sweep: the clock of the books goes on, or stands still; and how far apart the
-- reports of a member should be.
--
-- ARGV[1]  silent_s: silence allowed to a member, in microseconds
-- ARGV[2]  max_stop_s: how long the clock may stand for a reason, in microseconds
-- ARGV[3]  is_refusing: 1 if the caller had no room for reports of members since its last sweep
-- ARGV[4]  is_present: 1 if the caller has been there, and Redis for it, since its last sweep
-- Calls    whole, integer
-- Result   {'ok', spread_us, silent_us}: time between reports that the number of members asks for,
--           and the silence allowed to members that keep to it
--
-- While no coordinator is there, no time passes: nobody could be heard. A sweep that is late, by
-- one who was there, counts for no more than a gap, so that delays cannot keep the clock from going
-- on.
--
-- The clock stands for a reason while reports are refused, or most members are silent at once: they
-- are not dead, the way to them is. Among few members that takes all of them, and two at least. A
-- reason lasts for a moment after it was last seen, because each coordinator sees its own requests
-- only. All reasons share one limit, which starts anew when there was none for as long as that.

local state = redis.call('HMGET', KEYS[1], 'stopped_us', 'calm_us')
local stopped_us, calm_us = math.max(0, whole(state[1]) or 0), math.max(0, whole(state[2]) or 0)
local max_stop_us, elapsed_us = tonumber(ARGV[2]), now_us - swept_us
local absent = elapsed_us > CONST.max_gap_us and ARGV[4] ~= '1'

-- The time since the last sweep.
local passed_us = math.min(math.max(elapsed_us, 0), CONST.max_gap_us)
local stood_for = standing ~= '' and standing or 'absence'
if absent or standing ~= '' then
  passed_us = 0
end
paused_us = paused_us + elapsed_us - passed_us
clock_us = now_us - paused_us
elapsed_us = math.max(elapsed_us, 0)
if absent then
  stood_for = 'absence'
elseif standing ~= '' then
  stopped_us = stopped_us + elapsed_us
end
local stood = {}
if elapsed_us > passed_us then
  local field = 'stood_' .. stood_for .. '_us'
  local stood_us = whole(redis.call('HGET', KEYS[1], field)) or 0
  stood = {field, integer(stood_us + elapsed_us - passed_us)}
end

-- The time until the next.
local members = redis.call('ZCARD', KEY.producers_seen) + redis.call('ZCARD', KEY.consumers_seen)
spread_us = math.max(members * CONST.report_spacing_us, spread_us - elapsed_us / CONST.spread_decay)
spread_us = math.floor(math.min(spread_us, CONST.max_spread_us))
local silent_us = math.max(tonumber(ARGV[1]), CONST.heartbeats_missed * spread_us)
local horizon = integer(clock_us - silent_us / 2)
local silent = redis.call('ZCOUNT', KEY.producers_seen, '-inf', horizon)
  + redis.call('ZCOUNT', KEY.consumers_seen, '-inf', horizon)
local enough = members < CONST.few_members and members or members * CONST.silent_share
local reason = ARGV[3] == '1' and 'refusal' or silent >= math.max(enough, 2) and 'silence'
calm_us = reason and 0 or calm_us + elapsed_us
if calm_us > max_stop_us then
  stopped_us = 0
end
standing = reason or calm_us < CONST.reason_lasts_us and standing or ''
if stopped_us + CONST.sweep_period_us > max_stop_us then
  standing = ''
end
redis.call('HSET', KEYS[1], 'paused_us', integer(paused_us), 'swept_us', integer(now_us),
  'standing', standing, 'spread_us', integer(spread_us),
  'stopped_us', integer(stopped_us), 'calm_us', integer(calm_us), unpack(stood))
return {'ok', spread_us, silent_us}
