-- Tenants in the order of their names, with their quotas and what they have on lease.
--
-- ARGV[1]  cursor: go on after this tenant; '' from the start
-- ARGV[2]  limit: how many at most
-- ARGV[3]  as_tenant: only what this tenant may see; '' for all
-- Calls    quota_in, tenant_of, integer, tenant_room
-- Result   {'ok', rows}
--            row {tenant, cohort, nominal, borrowing, lending, each, leased, available}: '' is none
-- @flags no-writes

local names, rows = {}, {}
local function add(name)
  if string.find(name, '^%w') and (ARGV[3] == '' and name > ARGV[1] or ARGV[3] == name) then
    names[name] = true
  end
end
-- Few enough to be sorted here: the quotas file keeps to a bound, and tokens name the others.
for _, index in ipairs({KEY.quotas, KEY.tenants}) do
  for _, name in ipairs(redis.call('HKEYS', index)) do
    add(name)
  end
end
local sorted = {}
for name in pairs(names) do
  sorted[#sorted + 1] = name
end
table.sort(sorted)
for index = 1, math.min(#sorted, tonumber(ARGV[2])) do
  local name = sorted[index]
  local field = redis.call('HMGET', KEY.quotas, name, '*')
  local quota, leased = quota_in(field[1] or field[2]), tenant_of(name).leased
  rows[index] = {name, '', '', '', '', '', integer(leased), ''}
  if quota then
    local shown = function(bytes)
      return bytes and bytes < CONST.max_bytes and integer(bytes) or ''
    end
    rows[index] = {name, quota.cohort or '', shown(quota.nominal),
      quota.cohort and shown(quota.borrowing) or '',
      quota.cohort and shown(quota.nominal - quota.guaranteed) or '', shown(quota.each),
      integer(leased), quota.nominal < CONST.max_bytes
        and integer(tenant_room(quota, name, CONST.max_bytes).bytes) or ''}
  end
end
return {'ok', rows}
