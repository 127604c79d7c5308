-- Profiles of models, one or all.
--
-- ARGV[1]  model: only this one, or ''
-- Result   {'ok', {profile, ...}}, each JSON, in no order
-- @flags no-writes

if ARGV[1] == '' then
  return {'ok', redis.call('HVALS', KEY.profiles)}
end
local profile = redis.call('HGET', KEY.profiles, ARGV[1])
return {'ok', profile and {profile} or {}}
