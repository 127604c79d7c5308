-- A page of the profiles of models, by the model's name, or one.
--
-- ARGV[1]  cursor: go on after this model; '' from the start
-- ARGV[2]  limit: how many at most
-- ARGV[3]  model: only this one, or ''
-- Result   {'ok', {profile, ...}}, each JSON
-- @flags no-writes

-- Few enough to be sorted here: `put_profile` keeps to a bound.
local models, profiles = redis.call('HKEYS', KEY.profiles), {}
table.sort(models)
for _, model in ipairs(models) do
  if (ARGV[3] == '' and model > ARGV[1] or ARGV[3] == model) and #profiles < tonumber(ARGV[2]) then
    profiles[#profiles + 1] = redis.call('HGET', KEY.profiles, model)
  end
end
return {'ok', profiles}
