-- Tenants: whose a member or a lease is, and how much each tenant has on lease.
--
-- A member belongs to the tenant of the token that it reported with first, a lease to the tenant of
-- its consumer. Where there are no tenants, '' stands for theirs and nothing here is read or
-- written. What a tenant must not see does not exist for it: `as_tenant` is that of the caller's
-- token, or '' when the caller may see all.

-- Whether a caller may see, and act on, what belongs to `tenant`.
local function is_visible(tenant, as_tenant)
  return (as_tenant or '') == '' or tenant == as_tenant
end

-- Read what these tenants have on lease, those that are known already left out.
local function load_tenants(names)
  local unread = {}
  for _, name in ipairs(names) do
    unread[#unread + 1] = not tenants[name] and name or nil
  end
  local leased = #unread > 0 and redis.call('HMGET', KEY.tenants, unpack(unread)) or {}
  for index, name in ipairs(unread) do
    tenants[name] = {leased = whole(leased[index]) or 0, changes = {}}
  end
end

-- Bytes on lease of a tenant, as this call leaves them; `settle` writes what has changed.
local function tenant_of(name)
  if not tenants[name] then
    load_tenants({name})
  end
  return tenants[name]
end

local function count_for(name, consumer_id, change)
  if name ~= '' and change ~= 0 then
    local tenant = tenant_of(name)
    tenant.leased = math.max(0, tenant.leased + change)
    tenant.changes[consumer_id] = (tenant.changes[consumer_id] or 0) + change
  end
end

local function set_leased(name, leased)
  if leased > 0 then
    redis.call('HSET', KEY.tenants, name, integer(leased))
  else
    redis.call('HDEL', KEY.tenants, name)
  end
end

local function write_tenants()
  for name, tenant in pairs(tenants) do
    if next(tenant.changes) then
      local key = KEY.tenant_leased .. name
      for consumer_id, change in pairs(tenant.changes) do
        local leased = (score_of(key, consumer_id) or 0) + change
        if leased > 0 then
          enlist(key, consumer_id, leased)
        else
          strike(key, consumer_id)
        end
      end
      set_leased(name, tenant.leased)
      tenant.changes = {}
    end
  end
end

-- The tenant that a member is in from now on; or nil and the refusal. `known` is its record. A
-- token that is bound to a member takes it into its tenant, since an operator has said whose it is.
local function tenant_in(known, name, as_tenant, is_bound)
  if as_tenant == '' or known.tenant == as_tenant then
    return known.tenant
  elseif known.incarnation and (known.tenant ~= '' or is_bound ~= '1') then
    return nil, refuse('forbidden', 'the name is that of a member of others', 'member', name)
  end
  return as_tenant
end

-- The refusal for a caller that may not act for a member, or nil.
local function why_not_for(known, noun, name, as_tenant)
  if known.incarnation and is_visible(known.tenant, as_tenant) then
    return nil
  end
  return refuse('unknown_resource', 'there is no ' .. noun .. ' ' .. name, noun .. '_id', name)
end
