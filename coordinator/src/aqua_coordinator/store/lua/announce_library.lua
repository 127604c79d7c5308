-- One step of the sweep: the caller's version of this program is in use; which others no longer are.
--
-- ARGV[1]  library: the name of the caller's
-- Calls    integer, whole
-- Result   {'ok', gone}: libraries that no coordinator has announced for long

redis.call('HSET', KEY.libraries, ARGV[1], integer(now_us))
local announced, gone = redis.call('HGETALL', KEY.libraries), {}
for index = 1, #announced, 2 do
  local seen_us = whole(announced[index + 1])
  if not seen_us or now_us - seen_us > CONST.library_retention_us then
    gone[#gone + 1] = announced[index]
    redis.call('HDEL', KEY.libraries, announced[index])
  end
end
return {'ok', gone}
