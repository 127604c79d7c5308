-- Quotas: how much a tenant and a consumer may have on lease, and what tenants of a cohort borrow.
--
-- As in Kueue: a tenant may have its nominal quota; beyond it, up to its borrowing limit, what
-- others of its cohort leave unused of what they lend. What it keeps for itself (its nominal quota
-- less its lending limit) is not lent. While an owner waits for what is lent, its cohort does not
-- borrow.
--
-- `put_quotas` writes, in one hash: for a tenant, or '*' for those not named, five words: nominal,
-- borrowing, guaranteed, consumer limit (bytes; '-' for no limit) and cohort ('-' for none); for
-- '@cohort' its bytes to lend, '|', and name, guaranteed and nominal of each member; for
-- '/consumer' a limit of its own; for '#tenant' how many members it may have ('-' for no limit).

local function quota_in(text)
  local nominal, borrowing, guaranteed, each, cohort =
    string.match(text or '', '^(%d+) (%S+) (%d+) (%S+) (%S+)$')
  return nominal and {nominal = tonumber(nominal), borrowing = whole(borrowing) or CONST.max_bytes,
    guaranteed = tonumber(guaranteed), each = whole(each), cohort = cohort ~= '-' and cohort} or nil
end

-- Members of a cohort, {name, guaranteed, nominal, leased}, and the bytes that they lend in all.
local function cohort_of(name)
  local cohort = cohorts[name]
  if not cohort then
    local text = redis.call('HGET', KEY.quotas, '@' .. name) or ''
    local lent, list = string.match(text, '^(%d+)|(.*)$')
    local names = {}
    cohort = {members = {}, lent = tonumber(lent or 0)}
    for member, guaranteed, nominal in string.gmatch(list or '', '(%S+) (%d+) (%d+)') do
      names[#names + 1] = member
      cohort.members[#names] = {name = member, guaranteed = tonumber(guaranteed),
        nominal = tonumber(nominal)}
    end
    load_tenants(names)
    cohorts[name] = cohort
  end
  for _, member in ipairs(cohort.members) do
    member.leased = tenant_of(member.name).leased
  end
  return cohort.members, cohort.lent
end

-- Whether an owner other than this tenant waits for what its cohort has borrowed.
local function is_awaited(cohort, tenant)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEY.quota_waits .. cohort, integer(clock_us),
      integer(clock_us + CONST.owner_waits_us), 'LIMIT', 0, 2)) do
    if name ~= tenant then
      return true
    end
  end
  return false
end

-- What a tenant may lease beyond what it has: {bytes, what, of, limit, used, owned, members,
-- cohort, unused}. `owned` is what is left of its nominal quota; `unused`, what it and its cohort
-- leave of all, is below zero when quotas were lowered.
local function tenant_room(quota, tenant, wanted)
  local leased = tenant_of(tenant).leased
  local owned = math.max(0, quota.nominal - leased)
  local room = {bytes = owned, what = 'tenant', of = tenant, limit = quota.nominal, used = leased,
    owned = owned}
  if not quota.cohort then
    return room
  end
  local members, lent = cohort_of(quota.cohort)
  local unused = lent
  for _, member in ipairs(members) do
    unused = unused - math.max(0, member.leased - member.guaranteed)
  end
  local kept = math.max(0, quota.guaranteed - leased)
  local most = math.max(0, quota.nominal + quota.borrowing - leased)
  room.members, room.cohort, room.limit = members, quota.cohort, quota.nominal + quota.borrowing
  room.bytes, room.unused = math.min(most, kept + math.max(0, unused)), kept + unused
  if room.bytes < most then
    room.what, room.of = 'cohort', quota.cohort
  end
  if wanted > owned and room.bytes > owned and is_awaited(quota.cohort, tenant) then
    room.bytes, room.what, room.of = owned, 'cohort', quota.cohort
  end
  return room
end

-- The tightest of all limits for a consumer that wants more; nil where there is none. `leased` is
-- what its record says, before this call.
local function headroom(tenant, consumer_id, leased, wanted)
  if not has_quotas then
    return nil
  end
  local field = redis.call('HMGET', KEY.quotas, tenant, '*', '/' .. consumer_id)
  local quota = tenant ~= '' and quota_in(field[1] or field[2]) or nil
  local room = quota and tenant_room(quota, tenant, wanted)
  local each = whole(field[3]) or quota and quota.each
  if each then
    local used = (whole(leased) or 0) + (of_consumers[consumer_id] or 0)
    local left = math.max(0, each - used)
    if not room or left < room.bytes then
      room = {bytes = left, what = 'consumer', of = consumer_id, limit = each, used = used,
        owned = 0}
    end
  end
  return room
end

-- What others of the cohort have beyond their nominal quota, if `bytes` are within the asker's own.
local function borrowed_by_others(room, bytes)
  local borrowed = 0
  if room and room.members and bytes <= room.owned then
    for _, member in ipairs(room.members) do
      borrowed = borrowed + math.max(0, member.leased - member.nominal)
    end
  end
  return borrowed
end

-- The refusal of a new member, whose tenant has as many in the books as it may; or nil.
local function why_not_join(known, name, tenant)
  if tenant == '' or known.incarnation or not has_quotas then
    return nil
  end
  local field = redis.call('HMGET', KEY.quotas, '#' .. tenant, '#*')
  local limit = whole(field[1] or field[2])
  local count = limit and redis.call('ZCARD', KEY.producers_of .. tenant)
    + redis.call('ZCARD', KEY.consumers_of .. tenant)
  if limit and count >= limit then
    return refuse('quota_exceeded', table.concat({'tenant', tenant, 'has', integer(count),
      'members of', integer(limit)}, ' '), 'quota', 'members', 'of', tenant, 'member', name)
  end
  return nil
end

local function over_quota(room, bytes)
  return refuse('quota_exceeded', table.concat({room.what, room.of, 'has', integer(room.bytes),
    'bytes left of its quota,', integer(bytes), 'are asked for'}, ' '),
    'quota', room.what, 'of', room.of, 'limit_bytes', integer(room.limit),
    'used_bytes', integer(room.used), 'available_bytes', integer(room.bytes),
    'borrowed_bytes', integer(borrowed_by_others(room, bytes)))
end
