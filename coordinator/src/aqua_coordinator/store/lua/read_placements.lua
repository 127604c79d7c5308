-- A page of the placer's plan in force, by the consumer's name.
--
-- ARGV[1]  cursor: go on after this name; '' from the start
-- ARGV[2]  limit: how many pairings at most
-- ARGV[3]  as_tenant: only what this tenant may see; '' for all
-- Calls    is_visible
-- Result   {'ok', plan_hash, pairings, {row, ...}, cursor}: pairings of the whole plan, how many;
--           where to go on, '' at the end
--            row {consumer_id, producers, reason}
-- @flags no-writes

local names, rows = redis.call('ZRANGEBYLEX', KEY.placement_names,
  ARGV[1] == '' and '-' or '(' .. ARGV[1], '+', 'LIMIT', 0, tonumber(ARGV[2])), {}
for _, name in ipairs(names) do
  if (ARGV[3] or '') == ''
      or is_visible(redis.call('HGET', KEY.consumer .. name, 'tenant'), ARGV[3]) then
    rows[#rows + 1] = {name, redis.call('HGET', KEY.placements, name),
      redis.call('HGET', KEY.placement_reasons, name) or ''}
  end
end
return {'ok', redis.call('HGET', KEYS[1], 'plan_hash') or '',
  redis.call('ZCARD', KEY.placement_names), rows,
  #names == tonumber(ARGV[2]) and names[#names] or ''}
