-- Leases and the offers they are booked on. `step` is the only place that changes a state, and
-- it asks the table; `book` is the only place that moves bytes; `settle` ends every call that
-- may write: it writes what happened to producers and lists, once for each, and the epochs issued.

local NEXT = LEASE_TRANSITIONS
local BOOKED = LEASE_BOOKED_STATES
-- States that may be renewed: the holder has a right that a clock can end.
local RIGHTFUL = LEASE_RIGHTFUL_STATES
local TRANSPORTS = KNOWN_TRANSPORTS

-- What a producer lends. One that has no record, or a bad one, lends nothing until it reports.
local function offer_of(producer_id)
  local offer = offers[producer_id]
  if not offer then
    local key = KEY.producer .. producer_id
    local field = redis.call('HMGET', key, 'offered_bytes', 'leased_bytes', 'domain', 'grantable',
      'slab_bytes', 'endpoint', 'transport', 'incarnation', 'states', 'unproven_bytes', 'node',
      'unreachable', 'tenant')
    local offered, leased, slab_bytes = whole(field[1]), whole(field[2]), whole(field[5])
    local exists = offered and leased and leased >= 0 and leased <= offered
      and slab_bytes and slab_bytes > 0 and is_name(field[3]) and field[6]
      and TRANSPORTS[field[7]] and is_name(field[8]) or false
    if not exists and (field[1] or field[8]) then
      set_aside(key, 'is no producer', table.concat({
        field[1] or '', field[2] or '', field[5] or '', field[3] or '', field[8] or ''}, ' '))
      if not reading then
        redis.call('DEL', key)
      end
    end
    offer = {
      exists = exists, offered = exists and offered or 0, leased = exists and leased or 0,
      domain = exists and field[3], grantable = exists and field[4] == '1',
      slab_bytes = slab_bytes, endpoint = field[6], transport = field[7],
      incarnation = field[8], states = field[9], unproven = whole(field[10]) or 0,
      node = field[11], unreachable = field[12], tenant = field[13] or '',
    }
    offers[producer_id] = offer
  end
  return offer
end

local function list_offer(producer_id, offer)
  local free = offer.offered - offer.leased
  if free > 0 and offer.grantable then
    enlist(KEY.free .. offer.domain, producer_id, free)
  else
    strike(KEY.free .. offer.domain, producer_id)
  end
end

-- Booked leases of a producer by state. Every lease starts in the initial state, and many end
-- there: those are not counted, but what the others leave.
local function counts_in(states)
  local counts = {}
  for state, number in string.gmatch(states or '', '(%l+)=(%d+)') do
    counts[state] = BOOKED[state] and whole(number)
  end
  return counts
end

local function counts_of(offer)
  offer.counts = offer.counts or counts_in(offer.states)
  return offer.counts
end

local function count(offer, state, change)
  if BOOKED[state] and state ~= CONST.initial_state then
    local counts = counts_of(offer)
    counts[state] = (counts[state] or 0) + change
    offer.changed = true
  end
end

local function settle()
  for producer_id, offer in pairs(offers) do
    if offer.changed and offer.exists then
      local words = {'offered_bytes', integer(offer.offered), 'leased_bytes', integer(offer.leased)}
      if offer.counts then
        local states = {}
        for state, number in pairs(offer.counts) do
          states[#states + 1] = number > 0 and state .. '=' .. integer(number) or nil
        end
        words[5], words[6] = 'states', table.concat(states, ' ')
      end
      redis.call('HSET', KEY.producer .. producer_id, unpack(words))
      list_offer(producer_id, offer)
      offer.changed = false
    end
  end
  -- A consumer that has no record yet, or no more, finds its sum when it reports.
  for consumer_id, change in pairs(of_consumers) do
    local key = KEY.consumer .. consumer_id
    local leased = change ~= 0 and whole(redis.call('HGET', key, 'leased_bytes'))
    if leased then
      redis.call('HSET', key, 'leased_bytes', integer(math.max(0, leased + change)))
    end
  end
  of_consumers = {}
  write_tenants()
  write_lists()
  write_epoch()
end

-- A record is one string: a hash would cost twice as much to write, by its words. The tenant may be
-- missing; what comes after the fields that we know is a later version's, and is kept.
local RECORD = '^(%l+)\n(%d+)\n(%d+)\n(%w[%w._:-]*)\n(%w[%w._:-]*)\n(%d+)\n(%d+)\n(%-?%d+)\n'
  .. '([^\n]*)\n?(%d*)\n?([%w._:-]*)(.*)$'

-- The lease of a record, or nil: one that could not have been written by a step.
local function lease_in(lease_id, record)
  local state, last_epoch, granted_epoch, producer_id, consumer_id, bytes, ttl_us, granted_us,
    reason, granted_bytes, tenant, later = string.match(record, RECORD)
  if not state or not (BOOKED[state] or state == STATE.released or state == STATE.lost) then
    return nil
  end
  local lease = {
    lease_id = lease_id, state = state, epoch = tonumber(last_epoch),
    granted_epoch = tonumber(granted_epoch), producer_id = producer_id,
    consumer_id = consumer_id, bytes = tonumber(bytes), ttl_us = tonumber(ttl_us),
    granted_us = tonumber(granted_us), reason = reason,
    granted_bytes = tonumber(granted_bytes) or tonumber(bytes), tenant = tenant,
    later = later,
  }
  local sound = lease.granted_epoch <= lease.epoch and lease.epoch <= CONST.max_epoch
    and lease.bytes <= lease.granted_bytes and lease.granted_bytes <= CONST.max_bytes
    and lease.ttl_us <= CONST.max_epoch and math.abs(lease.granted_us) <= CONST.max_epoch
    and (lease.bytes > 0) == (BOOKED[state] or false) and (tenant == '' or is_name(tenant))
  return sound and lease or nil
end

local function drop_lease(lease_id, reason, record)
  set_aside(KEY.lease .. lease_id, reason, record)
  leases[lease_id] = false
  if not reading then
    redis.call('DEL', KEY.lease .. lease_id)
  end
end

-- Read the records of these leases, those that are known already left out.
local function load_leases(lease_ids)
  local unread, keys = {}, {}
  for _, lease_id in ipairs(lease_ids) do
    if leases[lease_id] == nil then
      leases[lease_id] = false
      unread[#unread + 1] = lease_id
      keys[#keys + 1] = KEY.lease .. lease_id
    end
  end
  for first = 1, #keys, MAX_WORDS do
    local last = math.min(first + MAX_WORDS - 1, #keys)
    for index, record in ipairs(redis.call('MGET', unpack(keys, first, last))) do
      local lease_id = unread[first + index - 1]
      leases[lease_id] = record and lease_in(lease_id, record) or false
      if record and not leases[lease_id] then
        drop_lease(lease_id, 'is no lease', record)
      end
    end
  end
end

-- The lease, or false when the books do not have it.
local function lease_of(lease_id)
  if leases[lease_id] == nil then
    load_leases({lease_id})
  end
  return leases[lease_id]
end

-- The leases on a member's list (`role` says whose list it is), in its order, or newest first; not
-- more than `most`. What is not a booked lease of this member is set aside.
local function leases_on(list, role, member, newest_first, most)
  local key, found = list .. member, {}
  write_list(key)
  local lease_ids = redis.call(newest_first and 'ZREVRANGE' or 'ZRANGE', key, 0, (most or 0) - 1)
  load_leases(lease_ids)
  for _, lease_id in ipairs(lease_ids) do
    local lease = leases[lease_id]
    if lease and BOOKED[lease.state] and lease[role] == member then
      found[#found + 1] = lease
    else
      set_aside(key, lease_id .. ' is listed, and no booked lease of this member')
      strike(key, lease_id)
      if not lease or lease[role] == member then
        drop_lease(lease_id, 'is listed, and not booked', lease and lease.state)
      end
    end
  end
  return found
end

-- A member contradicts a record. Who is right? The lists of both members bear out a record that a
-- step has written; one that they do not is set aside.
local function is_borne_out(lease)
  if not BOOKED[lease.state]
      or score_of(KEY.producer_leases .. lease.producer_id, lease.lease_id) == lease.granted_epoch
      and score_of(KEY.consumer_leases .. lease.consumer_id, lease.lease_id) then
    return true
  end
  drop_lease(lease.lease_id, 'is not listed by its members')
  return false
end

-- Write the record; that of an ended lease expires.
local function write_lease(lease)
  local record = table.concat({
    lease.state, integer(lease.epoch), integer(lease.granted_epoch), lease.producer_id,
    lease.consumer_id, integer(lease.bytes), integer(lease.ttl_us), integer(lease.granted_us),
    lease.reason, integer(lease.granted_bytes),
  }, '\n')
  if lease.tenant ~= '' or lease.later ~= '' then
    record = record .. '\n' .. lease.tenant .. lease.later
  end
  if BOOKED[lease.state] then
    redis.call('SET', KEY.lease .. lease.lease_id, record)
  else
    redis.call('SET', KEY.lease .. lease.lease_id, record, 'PX', CONST.ended_retention_ms)
  end
end

-- A lease that the books did not have; `save` writes it.
local function open_lease(lease)
  lease.granted_us, lease.bytes, lease.reason, lease.later = clock_us, 0, '', ''
  lease.tenant = lease.tenant or ''
  lease.touched = true
  leases[lease.lease_id] = lease
  return lease
end

local function book(lease, bytes)
  if bytes == lease.bytes then
    return
  end
  local offer = offer_of(lease.producer_id)
  offer.leased = math.max(0, offer.leased + bytes - lease.bytes)
  offer.changed = true
  of_consumers[lease.consumer_id] = (of_consumers[lease.consumer_id] or 0) + bytes - lease.bytes
  count_for(lease.tenant, lease.consumer_id, bytes - lease.bytes)
  lease.bytes = bytes
  lease.touched = true
  if bytes > 0 then
    enlist(KEY.consumer_leases .. lease.consumer_id, lease.lease_id, bytes)
  end
end

-- A lease whose tenant was not known is its consumer's, whose tenant is.
local function attribute(lease, tenant)
  if lease.tenant == '' and tenant ~= '' then
    lease.tenant, lease.touched = tenant, true
    count_for(tenant, lease.consumer_id, lease.bytes)
  end
end

-- Put the lease where its producer and listings find it.
local function list_lease(lease)
  enlist(KEY.producer_leases .. lease.producer_id, lease.lease_id, lease.granted_epoch)
end

local function set_deadline(lease, deadline_us)
  enlist(KEY.deadlines, lease.lease_id, deadline_us)
end

-- For its time to live from now on; in a large cluster, for as long as its holder may be silent.
local function prolong(lease)
  set_deadline(lease, clock_us + math.max(lease.ttl_us, CONST.heartbeats_missed * spread_us))
end

-- Take `event`; false when the table refuses it. `reason` is told to members that still name the
-- lease, and matters only where its right ends.
local function step(lease, event, reason)
  local before = lease.state
  local after = NEXT[before .. ' ' .. event]
  if not after then
    return false
  end
  if after == before then
    return true
  end
  lease.state = after
  lease.touched = true
  local offer = offer_of(lease.producer_id)
  count(offer, before, -1)
  count(offer, after, 1)
  if RIGHTFUL[before] and not RIGHTFUL[after] then
    lease.reason = reason
    strike(KEY.deadlines, lease.lease_id)
    -- A lost producer may come back with its slabs and its lease (ADOPT), so that right only
    -- rests; every other end is final, and a new epoch fences what still acts on the old one.
    -- It has to be new for this lease only, so the books' counter is left alone.
    if after ~= STATE.lost then
      lease.epoch = math.max(lease.epoch + 1, now_us)
    end
  elseif RIGHTFUL[after] and not RIGHTFUL[before] then
    lease.reason = ''
    prolong(lease)
  end
  if BOOKED[before] and not BOOKED[after] then
    book(lease, 0)
    strike(KEY.producer_leases .. lease.producer_id, lease.lease_id)
    strike(KEY.consumer_leases .. lease.consumer_id, lease.lease_id)
  elseif BOOKED[after] and not BOOKED[before] then
    list_lease(lease)
  end
  return true
end

local function save(lease)
  if not lease.touched then
    return
  end
  write_lease(lease)
  emit(KIND.lease_changed, lease.producer_id, lease.consumer_id, lease.lease_id, lease.state,
    lease.bytes, lease.tenant)
  lease.touched = false
end

-- lease_id, epoch, state, producer_id, consumer_id, bytes, expires_in_us: a LeaseView.
local function lease_row(lease)
  local deadline_us = RIGHTFUL[lease.state] and score_of(KEY.deadlines, lease.lease_id)
  local expires_in_us = deadline_us and math.max(0, deadline_us - clock_us) or 0
  return {lease.lease_id, lease.epoch, lease.state, lease.producer_id, lease.consumer_id,
    lease.bytes, expires_in_us}
end
