-- Run several small scripts in one call, each over what the ones before it have left.
--
-- KEYS[1]  the books
-- ARGV[1...]  a small script's name, how many arguments it has, these; repeated
-- Result   {'ok', answers}: one for each script, refusals among them

local answers, at = {}, 1
while at < #ARGV do
  local size = tonumber(ARGV[at + 1])
  answers[#answers + 1] = small[ARGV[at]](KEYS, {unpack(ARGV, at + 2, at + 1 + size)})
  at = at + 2 + size
end
return {'ok', answers}
