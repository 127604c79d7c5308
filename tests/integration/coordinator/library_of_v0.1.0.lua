#!lua name=aqua_books_9d884a74ef5b0d2d
-- What cannot be right is set aside, so that a bad record stops no step: it leaves the books with
-- its reason, is counted and listed, and the step goes on as if that record had been lost. Members
-- repeat their full state, so the books heal by themselves.
--
-- `redis.call` is ours from here on: a key of the wrong type is set aside as a whole, and the
-- command is repeated on the empty key. A script that only reads sets nothing aside, but passes
-- over what is bad; `audit_books` comes by in the sweep.

local faults, reading = {}, false

-- Redis as it is when a function runs: while a library is loaded, it only registers functions.
local function server()
  return redis
end

local redis = {register_function = redis.register_function}

function redis.sha1hex(text)
  return server().sha1hex(text)
end

function redis.error_reply(text)
  return server().error_reply(text)
end

local function set_aside(key, reason, record)
  faults[#faults + 1] = key .. ' ' .. reason
  if not reading then
    redis.call('XADD', '{aqua}:quarantine', 'MAXLEN', '~', 1440, '*', 'key', key,
      'reason', reason, 'record', string.sub(record or '', 1, 512))
    -- The count may itself be junk.
    server().pcall('HINCRBY', '{aqua}:books', 'quarantined', 1)
  end
end

function redis.call(...)
  local answer = server().pcall(...)
  if type(answer) == 'table' and answer.err then
    if reading or not string.find(answer.err, '^WRONGTYPE') then
      error(answer, 0)
    end
    local key = select(2, ...)
    local kind = server().call('TYPE', key).ok
    server().call('DEL', key)
    set_aside(key, 'was a ' .. kind)
    answer = server().call(...)
  end
  return answer
end

-- Answers. A script answers {'ok', ...}, {'refused', code, message, name, value, ...} or
-- {'no_books'}. A refusal comes before the first write: nothing has changed.

local function refuse(code, message, ...)
  return {'refused', code, message, ...}
end

-- Lua's own tostring() keeps 14 digits; epochs and microseconds have 16.
local function integer(number)
  return string.format('%d', number)
end

-- What a field holds is checked where it is read, since whatever can be in Redis may be.

-- The whole number that a text says, or nil. tonumber() knows `nan`, `inf` and fractions as well.
local function whole(text)
  local number = text and tonumber(text)
  return number and number == math.floor(number) and math.abs(number) <= 2 ^ 53 and number or nil
end

-- Whether a text is a name of ours, see `aqua_protocol.ids`.
local function is_name(text)
  return text and #text <= 128 and string.find(text, '^%w[%w._:-]*$')
    and string.find(text, '%w$') and true or false
end

-- The life of the books, the clock and the epochs: what `begin` reads for every call.
--
-- A library lives on between calls, so what a call knows is set anew at its start, and only here;
-- a call that failed half-way leaves nothing behind that the next one would see.
--
-- Two times: `now_us` is Redis time. `clock_us` is the time that leases and members age by. Only
-- `advance_clock`, a step of the sweep, lets it go on, and makes it stand. It never goes back,
-- whatever Redis time does.

local now_us, clock_us, paused_us, swept_us, standing, spread_us
local books_id, min_epoch, epoch, issued, planned, schema
local offers, leases, unwritten, growths, of_consumers

local function redis_time_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- What the books say of themselves; nil when they are gone, or cannot be read, which is the same.
local function read_books()
  local field = redis.call('HMGET', '{aqua}:books', 'books_id', 'min_epoch', 'epoch', 'paused_us',
    'swept_us', 'planned', 'standing', 'spread_us', 'secret', 'schema')
  local first, last = whole(field[2]), whole(field[3])
  local paused, swept = whole(field[4]), whole(field[5])
  if not (is_name(field[1]) and first and last and paused and swept
      and field[9] and string.find(field[9], '^%x+$')) then
    return nil
  end
  return field[1], first, last, paused, swept, field[6] == '1', field[7] or '',
    whole(field[8]) or 0, field[9], whole(field[10]) or 1
end

-- The answer instead of the script's, when there are no books or their schema is not ours.
local function why_not_begin(only_reads)
  reading, faults = only_reads, {}
  local _
  books_id, min_epoch, epoch, paused_us, swept_us, planned, standing, spread_us, _, schema =
    read_books()
  if not books_id then
    return {'no_books'}
  elseif schema < 1 or schema > 1 then
    return {'schema', schema}
  end
  now_us = redis_time_us()
  issued = false
  offers, leases, unwritten, growths, of_consumers = {}, {}, {}, {}, {}
  -- Not swept for long: no coordinator is there. Redis time before the last sweep: it was set back.
  local stands = standing ~= '' or now_us - swept_us > 3000000 or now_us < swept_us
  clock_us = (stands and swept_us or now_us) - paused_us
  return nil
end

-- What scripts that change the books need: fresh epochs, events.

-- Fencing tokens grow by counter and by Redis time, whichever is further: books that fell back to
-- an older copy (a failover, a torn log) still issue epochs above all that they issued before.
-- `write_epoch` records, once, what a call has issued.
local function next_epoch()
  epoch = math.max(epoch + 1, now_us)
  issued = true
  return epoch
end

local function write_epoch()
  if issued then
    redis.call('HSET', '{aqua}:books', 'epoch', integer(epoch))
    issued = false
  end
end

-- One field instead of one for each fact: an entry costs by its words. `rows.event` takes the
-- facts apart, in this order; '' stands for none.
local function emit(kind, producer_id, consumer_id, lease_id, state, bytes)
  redis.call('XADD', '{aqua}:events', 'MAXLEN', '~', 65536, '*', 'event',
    table.concat({kind, producer_id or '', consumer_id or '', lease_id or '', state or '',
      bytes and integer(bytes) or ''}, ' '))
end

-- An id that no record has: nobody can know it before, so nobody can have invented it before.
local function draw_id(prefix, noun, seed)
  local id
  repeat
    seed = redis.sha1hex(seed)
    id = noun .. string.sub(seed, 1, 16)
  until redis.call('EXISTS', prefix .. id) == 0
  return id
end

-- Sorted sets that list leases and offers. A call gathers its changes and `settle` writes them: one
-- command for each list instead of one for each member, since what a command costs is its call.
-- A script that reads a list by a command of its own after changes to it calls `write_list` before.

local MAX_WORDS = 1000

local function note(key, member, score, growth)
  unwritten[key] = unwritten[key] or {}
  unwritten[key][member] = score
  growths[key] = (growths[key] or 0) + growth
end

local function enlist(key, member, score)
  note(key, member, score, 1)
end

local function strike(key, member)
  note(key, member, false, -1)
end

-- How many a list has, if members were new when they were enlisted, and there when struck.
local function size_of(key)
  return redis.call('ZCARD', key) + (growths[key] or 0)
end

-- The number that a member is listed under, or false.
local function score_of(key, member)
  local score = unwritten[key] and unwritten[key][member]
  if score == nil then
    score = redis.call('ZSCORE', key, member)
  end
  return score and tonumber(score)
end

local function write_list(key)
  if not unwritten[key] then
    return
  end
  local added, struck = {}, {}
  for member, score in pairs(unwritten[key]) do
    if score then
      added[#added + 1] = integer(score)
      added[#added + 1] = member
    else
      struck[#struck + 1] = member
    end
  end
  for first = 1, #added, MAX_WORDS do
    redis.call('ZADD', key, unpack(added, first, math.min(first + MAX_WORDS - 1, #added)))
  end
  for first = 1, #struck, MAX_WORDS do
    redis.call('ZREM', key, unpack(struck, first, math.min(first + MAX_WORDS - 1, #struck)))
  end
  unwritten[key], growths[key] = nil, nil
end

local function write_lists()
  for key in pairs(unwritten) do
    write_list(key)
  end
end

-- Leases and the offers they are booked on. `step` is the only place that changes a state, and
-- it asks the table; `book` is the only place that moves bytes; `settle` ends every call that
-- may write: it writes what happened to producers and lists, once for each, and the epochs issued.

local NEXT = {['granted attach']='active',['granted renew']='granted',['granted reclaim']='released',['granted release']='released',['granted expire']='released',['granted revoke']='released',['granted consumer_lost']='released',['granted producer_lost']='lost',['active attach']='active',['active renew']='active',['active reclaim']='reclaiming',['active return_some']='active',['active return_all']='released',['active release']='fenced',['active expire']='fenced',['active revoke']='fenced',['active consumer_lost']='fenced',['active producer_lost']='lost',['reclaiming attach']='reclaiming',['reclaiming renew']='reclaiming',['reclaiming reclaim']='reclaiming',['reclaiming reclaim_done']='active',['reclaiming return_some']='reclaiming',['reclaiming return_all']='released',['reclaiming release']='fenced',['reclaiming expire']='fenced',['reclaiming revoke']='fenced',['reclaiming consumer_lost']='fenced',['reclaiming producer_lost']='lost',['fenced attach']='fenced',['fenced reclaim']='fenced',['fenced release']='fenced',['fenced revoke']='fenced',['fenced consumer_lost']='fenced',['fenced return_some']='fenced',['fenced return_all']='released',['fenced producer_lost']='lost',['released release']='released',['released adopt']='fenced',['lost release']='lost',['lost adopt']='active'}
local BOOKED = {active=true,fenced=true,granted=true,reclaiming=true}
-- States that may be renewed: the holder has a right that a clock can end.
local RIGHTFUL = {active=true,granted=true,reclaiming=true}
local TRANSPORTS = {cuda_ipc=true,cuda_vmm=true,memfd=true}

-- What a producer lends. One that has no record, or a bad one, lends nothing until it reports.
local function offer_of(producer_id)
  local offer = offers[producer_id]
  if not offer then
    local key = '{aqua}:producer:' .. producer_id
    local field = redis.call('HMGET', key, 'offered_bytes', 'leased_bytes', 'domain', 'grantable',
      'slab_bytes', 'endpoint', 'transport', 'incarnation', 'states', 'unproven_bytes', 'node',
      'unreachable')
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
      node = field[11], unreachable = field[12],
    }
    offers[producer_id] = offer
  end
  return offer
end

local function list_offer(producer_id, offer)
  local free = offer.offered - offer.leased
  if free > 0 and offer.grantable then
    enlist('{aqua}:free:' .. offer.domain, producer_id, free)
  else
    strike('{aqua}:free:' .. offer.domain, producer_id)
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
  if BOOKED[state] and state ~= 'granted' then
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
      redis.call('HSET', '{aqua}:producer:' .. producer_id, unpack(words))
      list_offer(producer_id, offer)
      offer.changed = false
    end
  end
  -- A consumer that has no record yet, or no more, finds its sum when it reports.
  for consumer_id, change in pairs(of_consumers) do
    local key = '{aqua}:consumer:' .. consumer_id
    local leased = change ~= 0 and whole(redis.call('HGET', key, 'leased_bytes'))
    if leased then
      redis.call('HSET', key, 'leased_bytes', integer(math.max(0, leased + change)))
    end
  end
  of_consumers = {}
  write_lists()
  write_epoch()
end

-- A record is one string: a hash would cost twice as much to write, by its words. What comes after
-- the fields that we know is a later version's, and is kept.
local RECORD = '^(%l+)\n(%d+)\n(%d+)\n(%w[%w._:-]*)\n(%w[%w._:-]*)\n(%d+)\n(%d+)\n(%-?%d+)\n'
  .. '([^\n]*)\n?(%d*)(.*)$'

-- The lease of a record, or nil: one that could not have been written by a step.
local function lease_in(lease_id, record)
  local state, last_epoch, granted_epoch, producer_id, consumer_id, bytes, ttl_us, granted_us,
    reason, granted_bytes, later = string.match(record, RECORD)
  if not state or not (BOOKED[state] or state == 'released' or state == 'lost') then
    return nil
  end
  local lease = {
    lease_id = lease_id, state = state, epoch = tonumber(last_epoch),
    granted_epoch = tonumber(granted_epoch), producer_id = producer_id,
    consumer_id = consumer_id, bytes = tonumber(bytes), ttl_us = tonumber(ttl_us),
    granted_us = tonumber(granted_us), reason = reason,
    granted_bytes = tonumber(granted_bytes) or tonumber(bytes), later = later,
  }
  local sound = lease.granted_epoch <= lease.epoch and lease.epoch <= 9007199254740991
    and lease.bytes <= lease.granted_bytes and lease.granted_bytes <= 1125899906842624
    and lease.ttl_us <= 9007199254740991 and math.abs(lease.granted_us) <= 9007199254740991
    and (lease.bytes > 0) == (BOOKED[state] or false)
  return sound and lease or nil
end

local function drop_lease(lease_id, reason, record)
  set_aside('{aqua}:lease:' .. lease_id, reason, record)
  leases[lease_id] = false
  if not reading then
    redis.call('DEL', '{aqua}:lease:' .. lease_id)
  end
end

-- Read the records of these leases, those that are known already left out.
local function load_leases(lease_ids)
  local unread, keys = {}, {}
  for _, lease_id in ipairs(lease_ids) do
    if leases[lease_id] == nil then
      leases[lease_id] = false
      unread[#unread + 1] = lease_id
      keys[#keys + 1] = '{aqua}:lease:' .. lease_id
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
      or score_of('{aqua}:producer_leases:' .. lease.producer_id, lease.lease_id) == lease.granted_epoch
      and score_of('{aqua}:consumer_leases:' .. lease.consumer_id, lease.lease_id) then
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
  }, '\n') .. lease.later
  if BOOKED[lease.state] then
    redis.call('SET', '{aqua}:lease:' .. lease.lease_id, record)
  else
    redis.call('SET', '{aqua}:lease:' .. lease.lease_id, record, 'PX', 120000)
  end
end

-- A lease that the books did not have; `save` writes it.
local function open_lease(lease)
  lease.granted_us, lease.bytes, lease.reason, lease.later = clock_us, 0, '', ''
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
  lease.bytes = bytes
  lease.touched = true
  if bytes > 0 then
    enlist('{aqua}:consumer_leases:' .. lease.consumer_id, lease.lease_id, bytes)
  end
end

-- Put the lease where its producer and listings find it.
local function list_lease(lease)
  enlist('{aqua}:producer_leases:' .. lease.producer_id, lease.lease_id, lease.granted_epoch)
end

local function set_deadline(lease, deadline_us)
  enlist('{aqua}:deadlines', lease.lease_id, deadline_us)
end

-- For its time to live from now on; in a large cluster, for as long as its holder may be silent.
local function prolong(lease)
  set_deadline(lease, clock_us + math.max(lease.ttl_us, 3 * spread_us))
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
    strike('{aqua}:deadlines', lease.lease_id)
    -- A lost producer may come back with its slabs and its lease (ADOPT), so that right only
    -- rests; every other end is final, and a new epoch fences what still acts on the old one.
    -- It has to be new for this lease only, so the books' counter is left alone.
    if after ~= 'lost' then
      lease.epoch = math.max(lease.epoch + 1, now_us)
    end
  elseif RIGHTFUL[after] and not RIGHTFUL[before] then
    lease.reason = ''
    prolong(lease)
  end
  if BOOKED[before] and not BOOKED[after] then
    book(lease, 0)
    strike('{aqua}:producer_leases:' .. lease.producer_id, lease.lease_id)
    strike('{aqua}:consumer_leases:' .. lease.consumer_id, lease.lease_id)
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
  emit('lease_changed', lease.producer_id, lease.consumer_id, lease.lease_id, lease.state,
    lease.bytes)
  lease.touched = false
end

-- lease_id, epoch, state, producer_id, consumer_id, bytes, expires_in_us: a LeaseView.
local function lease_row(lease)
  local deadline_us = RIGHTFUL[lease.state] and score_of('{aqua}:deadlines', lease.lease_id)
  local expires_in_us = deadline_us and math.max(0, deadline_us - clock_us) or 0
  return {lease.lease_id, lease.epoch, lease.state, lease.producer_id, lease.consumer_id,
    lease.bytes, expires_in_us}
end

-- Order of a member's reports: by incarnation, then by revision.

-- The refusal, or nil. A report may be repeated word for word; anything else under a revision
-- that has been booked is older knowledge than the books have.
local function why_stale(known, name, incarnation, revision, fingerprint)
  if not known.incarnation then
    return nil
  end
  if known.incarnation == incarnation then
    if revision < known.revision
        or (revision == known.revision and fingerprint ~= known.fingerprint) then
      return refuse('stale_revision', 'the books already hold a newer report of ' .. name,
        'revision', integer(revision), 'booked_revision', integer(known.revision))
    end
  elseif string.find(' ' .. known.retired .. ' ', ' ' .. incarnation .. ' ', 1, true) then
    return refuse('stale_revision', 'a newer process has taken the place of this one',
      'member', name, 'incarnation', incarnation)
  end
  return nil
end

local function member_of(key)
  local field = redis.call('HMGET', key, 'incarnation', 'revision', 'fingerprint', 'retired',
    'domain', 'slab_bytes', 'avoided')
  local revision = whole(field[2])
  if field[1] and not (is_name(field[1]) and revision and is_name(field[5])) then
    set_aside(key, 'is no member', field[1])
    redis.call('DEL', key)
    field = {}
  end
  return {
    incarnation = field[1], revision = revision, fingerprint = field[3],
    retired = field[4] or '', domain = field[5], slab_bytes = whole(field[6]),
    avoided = field[7],
  }
end

-- The lives that this member has left behind, latest first, a bounded number of them.
local function retire(known)
  local names = {known.incarnation}
  for name in string.gmatch(known.retired, '%S+') do
    if #names < 8 then
      names[#names + 1] = name
    end
  end
  return table.concat(names, ' ')
end

-- Whether a member's field can be shown under this name.
local function is_readable(name, text)
  if string.find(name, '_bytes$') then
    return whole(text)
  elseif name == 'model' or name == 'queue_length' then
    return text == '' or (name == 'model' and is_name or whole)(text)
  elseif name == 'transport' then
    return TRANSPORTS[text]
  end
  return name == 'grantable' or name == 'endpoint' and text or is_name(text)
end

-- {name, silent_us, field, ...} of a member; nil when it has no record, or a bad one.
local function member_row(name, seen, prefix, ...)
  local seen_us = is_name(name) and redis.call('ZSCORE', seen, name)
  local row = seen_us and redis.call('HMGET', prefix .. name, ...)
  for index, field in ipairs({...}) do
    if not row or not is_readable(field, row[index]) then
      return nil
    end
  end
  table.insert(row, 1, clock_us - tonumber(seen_us))
  table.insert(row, 1, name)
  return row
end

-- Rows of members in the order of their names: a page as ARGV says, which is cursor ('' from the
-- start), limit, and '' or the name of the only one. A short page is the last.
local function member_rows(argv, index, ...)
  if argv[3] ~= '' then
    return {member_row(argv[3], ...)}
  end
  local rows, cursor, limit = {}, argv[1] == '' and '-' or '(' .. argv[1], tonumber(argv[2])
  repeat
    local names = redis.call('ZRANGEBYLEX', index, cursor, '+', 'LIMIT', 0, limit - #rows)
    for _, name in ipairs(names) do
      rows[#rows + 1] = member_row(name, ...)
      cursor = '(' .. name
    end
  until #names == 0 or #rows == limit
  return rows
end

-- Reclaims: what producers measured, and what operators ordered.

local function is_decimal(text)
  return text and string.find(text, '^%d[%d.e+-]*$') and tonumber(text) and true or false
end

-- reclaim_id, producer_id, origin, requested_bytes, returned_bytes, deadline_s, done, escalated,
-- first_slab_ms, total_ms: a ReclaimView; nil when there is no such reclaim, or a bad one.
local function reclaim_row(reclaim_id)
  local row = redis.call('HMGET', '{aqua}:reclaim:' .. reclaim_id, 'producer_id', 'origin',
    'requested_bytes', 'returned_bytes', 'deadline_s', 'done', 'escalated', 'first_slab_ms',
    'total_ms')
  local sound = is_name(reclaim_id) and is_name(row[1])
    and (row[2] == 'producer' or row[2] == 'operator') and whole(row[3]) and whole(row[4])
    and is_decimal(row[5]) and row[6] and row[7]
    and (row[8] == '' or is_decimal(row[8])) and (row[9] == '' or is_decimal(row[9]))
  table.insert(row, 1, reclaim_id)
  return sound and row or nil
end

local function close_reclaim(reclaim_id, producer_id, outcome)
  redis.call('HSET', '{aqua}:reclaim:' .. reclaim_id, 'done', '1', 'outcome', outcome)
  redis.call('PEXPIRE', '{aqua}:reclaim:' .. reclaim_id, 120000)
  redis.call('ZREM', '{aqua}:producer_reclaims:' .. producer_id, reclaim_id)
  redis.call('ZADD', '{aqua}:ended_reclaims', integer(now_us), reclaim_id)
  emit('reclaim_closed', producer_id)
end

-- What is listed as a reclaim, and has no record that could be read.
local function drop_reclaim(reclaim_id, producer_id)
  set_aside('{aqua}:reclaim:' .. reclaim_id, 'is no reclaim of ' .. producer_id)
  redis.call('DEL', '{aqua}:reclaim:' .. reclaim_id)
  redis.call('ZREM', '{aqua}:producer_reclaims:' .. producer_id, reclaim_id)
  redis.call('ZREM', '{aqua}:reclaims', reclaim_id)
end

-- What consumers say of producers that they could not attach to.
--
-- A consumer's word counts for itself: for a while it gets no lease of that life of the producer,
-- and for twice as long when it fails again. The word of one that found nothing at the endpoint is
-- kept with the producer as well; when enough voices say so the producer is suspected, and comes
-- last. So no voice, nor any number of them, bars a producer for others.

-- The subjects that a text of '<subject> <until_us> <span_us>' entries names now; and their count.
local function said_in(text)
  local subjects, count = {}, 0
  for subject, until_us in string.gmatch(text or '', '(%S+) (%d+) %d+') do
    local rest_us = until_us - clock_us
    if rest_us > 0 and rest_us <= 160000000 then
      subjects[subject], count = true, count + 1
    end
  end
  return subjects, count
end

-- The text with one more subject; the oldest goes when it gets long.
local function say(text, subject, span_us)
  local entries = {}
  for about, until_us, last_us in string.gmatch(text or '', '(%S+) (%d+) (%d+)') do
    if until_us + last_us > clock_us and about == subject then
      span_us = math.min(math.max(span_us, 2 * last_us), 160000000)
    elseif until_us + last_us > clock_us then
      entries[#entries + 1] = about .. ' ' .. until_us .. ' ' .. last_us
    end
  end
  if #entries >= 64 then
    table.remove(entries, 1)
  end
  entries[#entries + 1] = subject .. ' ' .. integer(clock_us + span_us) .. ' ' .. integer(span_us)
  return table.concat(entries, ' ')
end

-- A consumer could not attach to a lease that it is about to release.
local function note_failure(lease, failure, voice)
  local offer = offer_of(lease.producer_id)
  local consumer = '{aqua}:consumer:' .. lease.consumer_id
  local known = redis.call('HMGET', consumer, 'incarnation', 'avoided')
  if not offer.exists or not known[1] then
    return
  end
  local span_us = failure == 'unreachable' and 10000000 or 1000000
  redis.call('HSET', consumer, 'avoided',
    say(known[2], lease.producer_id .. '@' .. offer.incarnation, span_us))
  -- Of any other lease the producer has said that it was attached.
  if failure == 'unreachable' and (lease.state == 'granted' or lease.reason == 'expired') then
    offer.unreachable = say(offer.unreachable, voice ~= '' and voice or lease.consumer_id, span_us)
    redis.call('HSET', '{aqua}:producer:' .. lease.producer_id, 'unreachable', offer.unreachable)
  end
end

-- Which producer lends: the placer's pairing if there is one, else best fit inside the domain; of
-- those that meet the terms of the request, and of the suspected only if there is no other.

-- The free bytes that a list says, if it can be so.
local function listed_bytes(score)
  local bytes = whole(score)
  return bytes and bytes > 0 and bytes <= 1125899906842624 and bytes or 0
end

-- The producers of a pairing, best first; nil when the placer has said nothing.
local function pairing_of(consumer_id)
  local text = planned and redis.call('HGET', '{aqua}:placements', consumer_id)
  if not text then
    return nil
  end
  local producers = {}
  for producer_id in string.gmatch(text, '%S+') do
    producers[#producers + 1] = producer_id
  end
  return producers
end

-- What a producer must meet. `avoided` is what the consumer's record says of failed attaches.
local function terms_of(request, avoided)
  local terms = {request = request, excluded = said_in(avoided), ruled_out = 0}
  for _, producer_id in ipairs(request.exclude or {}) do
    terms.excluded[producer_id] = true
  end
  return terms
end

-- Of a listed producer; one that does not exist is found out by `lender`.
local function meets(terms, producer_id)
  local offer, request = offer_of(producer_id), terms.request
  if offer.exists and (terms.excluded[producer_id]
      or terms.excluded[producer_id .. '@' .. offer.incarnation]
      or (request.transport or offer.transport) ~= offer.transport
      or (request.slab_bytes or offer.slab_bytes) ~= offer.slab_bytes
      or (request.node or offer.node) ~= offer.node) then
    terms.ruled_out = terms.ruled_out + 1
    return false
  end
  local _, voices = said_in(offer.unreachable)
  local is_passed_over = voices >= 3 and not terms.takes_suspected
  terms.has_passed_over = terms.has_passed_over or is_passed_over
  return not is_passed_over
end

-- Write the list of free bytes that is about to be read, if scripts of the same call changed it.
local function refresh_free(domain)
  for producer_id, offer in pairs(offers) do
    if offer.changed then
      list_offer(producer_id, offer)
    end
  end
  write_list('{aqua}:free:' .. domain)
end

-- The first producer of the domain that meets the terms, as a command lists them from one count of
-- free bytes to another; and these. Mostly it is the first of all.
local function first_listed(command, domain, from, to, terms)
  local at, size, page = 0, 1, nil
  repeat
    page = redis.call(command, '{aqua}:free:' .. domain, from, to, 'WITHSCORES', 'LIMIT', at, size)
    for index = 1, #page, 2 do
      if meets(terms, page[index]) then
        return page[index], listed_bytes(page[index + 1])
      end
    end
    at, size = at + size, 256 - 1
  until #page == 0 or at >= 256
  return nil, 0
end

-- The producer with the most free bytes, and these: what a lease could get at most.
local function largest(domain, pairing, terms)
  refresh_free(domain)
  if not pairing then
    return first_listed('ZREVRANGEBYSCORE', domain, '+inf', '-inf', terms)
  end
  local best, most = nil, 0
  for _, producer_id in ipairs(pairing) do
    local free = listed_bytes(redis.call('ZSCORE', '{aqua}:free:' .. domain, producer_id))
    if free > most and meets(terms, producer_id) then
      best, most = producer_id, free
    end
  end
  return best, most
end

-- The first of the pairing, or the tightest of the domain, that has `bytes` free; else nil.
local function fitting(domain, pairing, bytes, terms)
  refresh_free(domain)
  if not pairing then
    return (first_listed('ZRANGEBYSCORE', domain, integer(bytes), '+inf', terms))
  end
  for _, producer_id in ipairs(pairing) do
    if listed_bytes(redis.call('ZSCORE', '{aqua}:free:' .. domain, producer_id)) >= bytes
        and meets(terms, producer_id) then
      return producer_id
    end
  end
  return nil
end

-- A producer that lends at least `least` bytes, the first or tightest for `bytes`, and its offer;
-- else nil and the most that there is. What the list tells wrong is put right.
local function lender(domain, pairing, bytes, least, terms)
  for _ = 1, 8 do
    local producer_id, most = fitting(domain, pairing, bytes, terms), bytes
    if not producer_id then
      terms.ruled_out = 0
      producer_id, most = largest(domain, pairing, terms)
    end
    if producer_id and most >= least then
      local offer = offer_of(producer_id)
      if offer.exists and offer.grantable and offer.domain == domain
          and offer.offered - offer.leased >= least then
        return producer_id, offer
      end
      set_aside('{aqua}:free:' .. domain, producer_id .. ' is listed with what it does not lend')
      strike('{aqua}:free:' .. domain, producer_id)
      offer.changed = offer.exists
    elseif terms.has_passed_over and not terms.takes_suspected then
      terms.takes_suspected = true
    else
      return nil, most
    end
  end
  return nil, 0
end

-- Who may act on a lease: the right consumer, under an epoch that the books have issued for it.

-- The refusal, or nil. `as_consumer` is '' unless the caller's token is bound to a consumer.
local function why_not_act(lease, lease_id, as_consumer, named_epoch)
  if not lease then
    return refuse('unknown_resource', 'there is no lease ' .. lease_id, 'lease_id', lease_id)
  end
  if as_consumer ~= '' and lease.consumer_id ~= as_consumer then
    return refuse('forbidden', 'this token is bound to another consumer', 'lease_id', lease_id)
  end
  if named_epoch < lease.granted_epoch or named_epoch > lease.epoch then
    return refuse('stale_epoch', 'the lease never had this epoch', 'lease_id', lease_id,
      'epoch', integer(named_epoch))
  end
  return nil
end

-- Answers kept for a while under the key that a client sent, so that a retry gets the first answer.

-- The first answer to this request, or nil; and the refusal, if the key came with another request.
local function first_answer(key, request)
  local first = redis.call('GET', key)
  local cut = first and string.find(first, '\n', 1, true)
  if not cut then
    return nil
  end
  if string.sub(first, 1, cut - 1) ~= request then
    return nil, refuse('idempotency_conflict', 'this key came with a different request before')
  end
  return string.sub(first, cut + 1)
end

local function keep_answer(key, request, answer)
  redis.call('SET', key, request .. '\n' .. answer, 'PX', 60000)
end

-- A producer leaves the books. Its leases must have been unbooked before; `domain` is false when
-- its record was lost.

local function forget_producer(producer_id, domain)
  for _, reclaim_id in ipairs(redis.call('ZRANGE', '{aqua}:producer_reclaims:' .. producer_id, 0, -1)) do
    close_reclaim(reclaim_id, producer_id, 'producer_lost')
  end
  redis.call('DEL', '{aqua}:producer:' .. producer_id)
  redis.call('ZREM', '{aqua}:producers', producer_id)
  redis.call('ZREM', '{aqua}:producers_seen', producer_id)
  if domain then
    redis.call('ZREM', '{aqua}:free:' .. domain, producer_id)
    redis.call('SREM', '{aqua}:unconfirmed:' .. domain, producer_id)
  end
  emit('producer_lost', producer_id)
end

local function forget_consumer(consumer_id)
  redis.call('DEL', '{aqua}:consumer:' .. consumer_id)
  redis.call('ZREM', '{aqua}:consumers', consumer_id)
  redis.call('ZREM', '{aqua}:consumers_seen', consumer_id)
  emit('consumer_lost', nil, consumer_id)
end

-- Makes functions of Redis of the scripts.
--
-- Every script but the one that opens the books finds them open. `run_several` runs scripts one after
-- the other in one call, each over what those before it have left: they share the reading of books
-- and producers, and the writing of lists. A script that fails there fails alone, which is sound,
-- since scripts check before they write.

local scripts = {}

local function register_function(name, flags, callback)
  redis.register_function({
    function_name = 'aqua_books_9d884a74ef5b0d2d_' .. name, callback = callback, flags = flags,
  })
end

-- Within open books, whose changes are written at the end.
local function writing(script)
  return function(keys, args)
    local refusal = why_not_begin(false)
    if refusal then
      return refusal
    end
    local answer = script(keys, args)
    settle()
    return answer
  end
end

local function register(name, flags, script)
  scripts[name] = script
  local callback = writing(script)
  if name == 'create_books' then
    callback = function(keys, args)
      reading = false
      return script(keys, args)
    end
  elseif flags[1] == 'no-writes' then
    callback = function(keys, args)
      return why_not_begin(true) or script(keys, args)
    end
  end
  register_function(name, flags, callback)
end

-- ARGV is a script's name, how many arguments it has, and these; repeated.
register_function('run_several', {}, writing(function(keys, args)
  local answers, at = {}, 1
  while at < #args do
    local last = at + 1 + tonumber(args[at + 1])
    local sound, answer = pcall(scripts[args[at]], keys, {unpack(args, at + 2, last)})
    local fault = type(answer) == 'table' and answer.err or 'ERR ' .. tostring(answer)
    answers[#answers + 1] = sound and answer or redis.error_reply(fault)
    at = last + 1
  end
  return {'ok', answers}
end))

register('advance_clock', {}, function(KEYS, ARGV)
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
-- While no coordinator is there, no time passes: nobody could be heard. A sweep that is late, by one
-- who was there, counts for no more than a gap, so that delays cannot keep the clock from going on.
--
-- The clock stands for a reason while reports are refused, or most members are silent at once: they
-- are not dead, the way to them is. Among few members that takes all of them, and two at least. A
-- reason lasts for a moment after it was last seen, because each coordinator sees its own requests
-- only. All reasons share one limit, which starts anew when there was none for as long as that.

local state = redis.call('HMGET', KEYS[1], 'stopped_us', 'calm_us')
local stopped_us, calm_us = whole(state[1]) or 0, whole(state[2]) or 0
local max_stop_us, elapsed_us = tonumber(ARGV[2]), now_us - swept_us
local absent = elapsed_us > 3000000 and ARGV[4] ~= '1'

-- The time since the last sweep.
local passed_us = math.min(math.max(elapsed_us, 0), 3000000)
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
if elapsed_us > passed_us then
  local field = 'stood_' .. stood_for .. '_us'
  local stood_us = whole(redis.call('HGET', KEYS[1], field)) or 0
  redis.call('HSET', KEYS[1], field, integer(stood_us + elapsed_us - passed_us))
end

-- The time until the next.
local members = redis.call('ZCARD', '{aqua}:producers_seen') + redis.call('ZCARD', '{aqua}:consumers_seen')
spread_us = math.max(members * 6000, spread_us - elapsed_us / 30)
spread_us = math.floor(math.min(spread_us, 60000000))
local silent_us = math.max(tonumber(ARGV[1]), 3 * spread_us)
local horizon = integer(clock_us - silent_us / 2)
local silent = redis.call('ZCOUNT', '{aqua}:producers_seen', '-inf', horizon)
  + redis.call('ZCOUNT', '{aqua}:consumers_seen', '-inf', horizon)
local enough = members < 10 and members or members * 0.55
local reason = ARGV[3] == '1' and 'refusal' or silent >= math.max(enough, 2) and 'silence'
calm_us = reason and 0 or calm_us + elapsed_us
if calm_us > max_stop_us then
  stopped_us = 0
end
standing = reason or calm_us < 1000000 and standing or ''
if stopped_us + 500000 > max_stop_us then
  standing = ''
end
redis.call('HSET', KEYS[1], 'paused_us', integer(paused_us), 'swept_us', integer(now_us),
  'standing', standing, 'spread_us', integer(spread_us),
  'stopped_us', integer(stopped_us), 'calm_us', integer(calm_us))
return {'ok', spread_us, silent_us}

end)
register('announce_library', {}, function(KEYS, ARGV)
-- One step of the sweep: the caller's version of this program is in use; which others no longer are.
--
-- ARGV[1]  library: the name of the caller's
-- Calls    integer, whole
-- Result   {'ok', gone}: libraries that no coordinator has announced for long
--
-- A version announces the schemas of the books that it reads. The books take a newer one when all
-- that are in use read it, so that no coordinator meets records that it cannot read. It has to have
-- been announced for some sweeps then: others may just not have come round.

local own = redis.call('HGET', '{aqua}:libraries', ARGV[1])
local first_us = whole(own and string.match(own, '^(%d+) ')) or now_us
redis.call('HSET', '{aqua}:libraries', ARGV[1], table.concat(
  {integer(first_us), integer(now_us), 1, 1}, ' '))
local announced, gone, newest = redis.call('HGETALL', '{aqua}:libraries'), {}, 1
for index = 1, #announced, 2 do
  local seen_us, max_schema = string.match(announced[index + 1], '^%d+ (%d+) %d+ (%d+)$')
  seen_us, max_schema = whole(seen_us), whole(max_schema)
  if not seen_us or not max_schema or now_us - seen_us > 600000000 then
    gone[#gone + 1] = announced[index]
    redis.call('HDEL', '{aqua}:libraries', announced[index])
  else
    newest = math.min(newest, max_schema)
  end
end
if newest > schema and now_us - first_us > 10000000 then
  redis.call('HSET', KEYS[1], 'schema', integer(newest))
end
return {'ok', gone}

end)
register('audit_books', {}, function(KEYS, ARGV)
-- Look at a page of the books: put right what follows from records, set aside what cannot be right.
--
-- ARGV[1]  cursor: where the last page ended; '' from the start
-- ARGV[2]  limit: how many members and leases, or somewhat more with the leases of the last member
-- Calls    score_of, set_aside, strike, set_deadline, enlist, write_lease, counts_of, offer_of,
--          drop_reclaim, leases_on, member_of, list_lease, integer, write_list, load_leases,
--          lease_of
-- Result   {'ok', faults, cursor}: sentences; where to go on, '' at the end
--
-- First reclaims and producers, then consumers, then deadlines. A producer whose sums cannot be right lends
-- nothing until its next report, which makes them anew.

local domains, limit, seen = {}, tonumber(ARGV[2]), 0
local phase, after = string.match(ARGV[1], '^(%l) (.*)$')
phase, after = phase or 'p', after or ''

local function check_lease(lease)
  local deadline = score_of('{aqua}:deadlines', lease.lease_id)
  if (deadline and true or false) ~= (RIGHTFUL[lease.state] or false) then
    set_aside('{aqua}:deadlines', lease.lease_id .. ' is ' .. lease.state .. ', its deadline disagrees')
    if deadline then
      strike('{aqua}:deadlines', lease.lease_id)
    else
      set_deadline(lease, clock_us + lease.ttl_us)
    end
  end
  local list = '{aqua}:consumer_leases:' .. lease.consumer_id
  if score_of(list, lease.lease_id) ~= lease.bytes then
    set_aside(list, lease.lease_id .. ' disagrees')
    enlist(list, lease.lease_id, lease.bytes)
  end
  if redis.call('PTTL', '{aqua}:lease:' .. lease.lease_id) ~= -1 then
    set_aside('{aqua}:lease:' .. lease.lease_id, 'would have vanished')
    write_lease(lease)
  end
end

local function check_sums(producer_id, offer, leases)
  local leased, counts = offer.unproven, {}
  for _, lease in ipairs(leases) do
    leased = leased + lease.bytes
    counts[lease.state] = (counts[lease.state] or 0) + 1
  end
  counts['granted'] = nil
  local agrees = leased == offer.leased
  for state in pairs(BOOKED) do
    agrees = agrees and (counts[state] or 0) == (counts_of(offer)[state] or 0)
  end
  local free = offer.grantable and offer.offered - offer.leased or 0
  local listed = score_of('{aqua}:free:' .. offer.domain, producer_id) or 0
  local waits = redis.call('SISMEMBER', '{aqua}:unconfirmed:' .. offer.domain, producer_id) == 1
  if agrees and listed == free and waits ~= offer.grantable then
    return
  end
  if offer.grantable or not waits or listed ~= 0 then
    set_aside('{aqua}:producer:' .. producer_id, table.concat({'has leased', leased, 'not', offer.leased,
      'or lists', listed, 'free, not', free}, ' '))
    offer.grantable, offer.changed = false, true
    redis.call('HSET', '{aqua}:producer:' .. producer_id, 'grantable', '0')
    redis.call('SADD', '{aqua}:unconfirmed:' .. offer.domain, producer_id)
  end
end

-- What waits or lends in a domain and is no producer of it.
local function check_domain(domain)
  if domains[domain] then
    return
  end
  domains[domain] = true
  local free, unconfirmed = '{aqua}:free:' .. domain, '{aqua}:unconfirmed:' .. domain
  for _, producer_id in ipairs(redis.call('ZREVRANGE', free, 0, limit - 1)) do
    if offer_of(producer_id).domain ~= domain then
      set_aside(free, producer_id .. ' is listed, and no producer')
      strike(free, producer_id)
    end
  end
  for _, producer_id in ipairs(redis.call('SRANDMEMBER', unconfirmed, limit)) do
    if offer_of(producer_id).domain ~= domain then
      set_aside(unconfirmed, producer_id .. ' is listed, and no producer')
      redis.call('SREM', unconfirmed, producer_id)
    end
  end
end

local function check_open_reclaims(producer_id)
  local open = redis.call('ZRANGE', '{aqua}:producer_reclaims:' .. producer_id, 0, -1, 'WITHSCORES')
  for index = 1, #open, 2 do
    if redis.call('HGET', '{aqua}:reclaim:' .. open[index], 'producer_id') ~= producer_id then
      drop_reclaim(open[index], producer_id)
    elseif not redis.call('ZSCORE', '{aqua}:reclaims', open[index]) then
      set_aside('{aqua}:reclaims', open[index] .. ' is not listed')
      redis.call('ZADD', '{aqua}:reclaims', open[index + 1], open[index])
    end
  end
end

local function check_producer(producer_id)
  local offer = offer_of(producer_id)
  local leases = leases_on('{aqua}:producer_leases:', 'producer_id', producer_id)
  check_open_reclaims(producer_id)
  for _, lease in ipairs(leases) do
    check_lease(lease)
  end
  if offer.exists then
    check_sums(producer_id, offer, leases)
    check_domain(offer.domain)
  end
  return #leases
end

local function check_consumer(consumer_id)
  member_of('{aqua}:consumer:' .. consumer_id)
  local leases = leases_on('{aqua}:consumer_leases:', 'consumer_id', consumer_id)
  for _, lease in ipairs(leases) do
    if not score_of('{aqua}:producer_leases:' .. lease.producer_id, lease.lease_id) then
      set_aside('{aqua}:producer_leases:' .. lease.producer_id, lease.lease_id .. ' is not listed')
      list_lease(lease)
    end
  end
  return #leases
end

-- Members in the order of their names; the last one, or nil when all have been seen.
local function check_members(index, last_seen, check)
  for _, name in ipairs(redis.call('ZRANGEBYLEX', index, after == '' and '-' or '(' .. after, '+',
      'LIMIT', 0, limit)) do
    if not redis.call('ZSCORE', last_seen, name) then
      set_aside(last_seen, name .. ' would never be missed')
      redis.call('ZADD', last_seen, integer(clock_us), name)
    end
    seen, after = seen + 1 + check(name), name
    if seen >= limit then
      return after
    end
  end
  return nil
end

local function go_on_with(next_phase, position)
  return {'ok', faults, next_phase .. ' ' .. position}
end

local function check_reclaims()
  for _, reclaim_id in ipairs(redis.call('ZRANGE', '{aqua}:reclaims', 0, limit - 1)) do
    if not redis.call('HGET', '{aqua}:reclaim:' .. reclaim_id, 'producer_id')
        and not redis.call('ZSCORE', '{aqua}:ended_reclaims', reclaim_id) then
      set_aside('{aqua}:reclaims', reclaim_id .. ' has no record')
      redis.call('ZREM', '{aqua}:reclaims', reclaim_id)
    end
  end
end

if phase == 'p' then
  if after == '' then
    -- Reading them is enough: what is of the wrong type is set aside.
    redis.call('XLEN', '{aqua}:events')
    redis.call('XLEN', '{aqua}:quarantine')
    redis.call('HLEN', '{aqua}:placements')
    redis.call('HLEN', '{aqua}:placement_reasons')
    redis.call('HLEN', '{aqua}:profiles')
    redis.call('ZCARD', '{aqua}:ended_reclaims')
    check_reclaims()
  end
  local last = check_members('{aqua}:producers', '{aqua}:producers_seen', check_producer)
  if last then
    return go_on_with('p', last)
  end
  phase, after = 'c', ''
end
if phase == 'c' then
  local last = check_members('{aqua}:consumers', '{aqua}:consumers_seen', check_consumer)
  if last then
    return go_on_with('c', last)
  end
  phase, after = 'd', ''
end
local first = tonumber(after) or 0
write_list('{aqua}:deadlines')
local lease_ids = redis.call('ZRANGE', '{aqua}:deadlines', first, first + limit - 1)
load_leases(lease_ids)
for _, lease_id in ipairs(lease_ids) do
  local lease = lease_of(lease_id)
  if not lease or not RIGHTFUL[lease.state] then
    set_aside('{aqua}:deadlines', lease_id .. ' has a deadline, and no right')
    strike('{aqua}:deadlines', lease_id)
  end
end
return #lease_ids == limit and go_on_with('d', first + limit) or {'ok', faults, ''}

end)
register('create_books', {}, function(KEYS, ARGV)
-- Open the books in an empty Redis, or read whose they are.
--
-- ARGV[1]  books_id: name of the new books
-- ARGV[2]  secret: for capability tokens, hexadecimal
-- Calls    read_books, integer, redis_time_us
-- Result   {'ok', books_id, secret, created (1 or 0)}
--
-- The first epoch is the Redis time in microseconds, so epochs grow across a loss of the books.

local books_id, _, _, _, _, _, _, _, secret, schema = read_books()
if books_id and (schema < 1 or schema > 1) then
  return {'schema', schema}
elseif books_id then
  return {'ok', books_id, secret, 0}
end
local now = integer(redis_time_us())
redis.call('HSET', KEYS[1], 'books_id', ARGV[1], 'secret', ARGV[2], 'min_epoch', now, 'epoch', now,
  'paused_us', '0', 'swept_us', now, 'schema', integer(1))
redis.call('XADD', '{aqua}:events', 'MAXLEN', '~', 65536, '*', 'event',
  'books_created' .. '     ')
return {'ok', ARGV[1], ARGV[2], 1}

end)
register('expire_leases', {}, function(KEYS, ARGV)
-- One step of the sweep: leases past their deadline expire.
--
-- ARGV[1]  limit: how many leases at most
-- Calls    integer, load_leases, lease_of, step, save, set_aside, strike
-- Result   {'ok', handled}: how many

local overdue = redis.call('ZRANGEBYSCORE', '{aqua}:deadlines', '-inf', integer(clock_us),
  'LIMIT', 0, tonumber(ARGV[1]))
load_leases(overdue)
for _, lease_id in ipairs(overdue) do
  local lease = lease_of(lease_id)
  if lease and step(lease, 'expire', 'expired') then
    save(lease)
  else
    set_aside('{aqua}:deadlines', lease_id .. ' has a deadline, and no right')
    strike('{aqua}:deadlines', lease_id)
  end
end
return {'ok', #overdue}

end)
register('forget_reclaims', {}, function(KEYS, ARGV)
-- One step of the sweep: the listing lets go of reclaims whose records have expired.
--
-- ARGV[1]  limit: how many at most
-- Calls    integer
-- Result   {'ok', forgotten}: how many

local horizon = integer(now_us - 120000 * 1000)
local names = redis.call('ZRANGEBYSCORE', '{aqua}:ended_reclaims', '-inf', horizon,
  'LIMIT', 0, tonumber(ARGV[1]))
for _, name in ipairs(names) do
  redis.call('ZREM', '{aqua}:ended_reclaims', name)
  redis.call('ZREM', '{aqua}:reclaims', name)
end
return {'ok', #names}

end)
register('grant_lease', {}, function(KEYS, ARGV)
-- Book bytes of one producer for one consumer.
--
-- ARGV[1]  request: a LeaseRequest as JSON, without nulls
-- ARGV[2]  idempotency_key
-- ARGV[3]  attach_window_s, in microseconds
-- ARGV[4]  seed: random, what the lease's id is drawn from
-- Calls    first_answer, refuse, is_name, pairing_of, terms_of, lender, size_of, integer,
--          next_epoch, draw_id, open_lease, list_lease, book, set_deadline, save, keep_answer
-- Result   {'ok', books_id, answer}: answer is these, by line feeds (an endpoint may hold some)
--            lease_id, epoch, producer_id, incarnation, consumer_id, bytes, expires_in_us,
--            not_after_us (Redis time), transport, slab_bytes, endpoint
-- Refuses  idempotency_conflict, unknown_resource, books_rebuilding, capacity_exhausted
--
-- A repeated key is answered with the words of the first time; a refusal is not kept, since a
-- retry may find memory.

local idempotency_key = '{aqua}:idempotency:' .. 'lease:' .. ARGV[2]
local first, conflict = first_answer(idempotency_key, ARGV[1])
if conflict then
  return conflict
elseif first then
  return {'ok', books_id, first}
end

local request = cjson.decode(ARGV[1])
local consumer_id, bytes = request.consumer_id, request.bytes
local least = request.min_bytes or bytes

local known = redis.call('HMGET', '{aqua}:consumer:' .. consumer_id, 'domain', 'avoided')
local domain = known[1]
if not is_name(domain) then
  return refuse('unknown_resource', 'consumer ' .. consumer_id .. ' has not reported yet',
    'consumer_id', consumer_id)
end

local pairing = pairing_of(consumer_id)
local terms = terms_of(request, known[2])
local producer_id, offer = lender(domain, pairing, bytes, least, terms)
if not producer_id then
  if redis.call('SCARD', '{aqua}:unconfirmed:' .. domain) > 0 then
    return refuse('books_rebuilding', 'producers have yet to confirm the books', 'domain', domain)
  end
  return refuse('capacity_exhausted', 'no producer of the domain can lend that much now',
    'domain', domain, 'available_bytes', integer(offer), 'paired', pairing and 'yes' or 'no',
    'ruled_out_count', integer(terms.ruled_out))
end
if size_of('{aqua}:producer_leases:' .. producer_id) >= 4096
    or size_of('{aqua}:consumer_leases:' .. consumer_id) >= 4096 then
  return refuse('capacity_exhausted', 'a member holds as many leases as a report can carry',
    'producer_id', producer_id, 'consumer_id', consumer_id)
end

local free = offer.offered - offer.leased
local granted = math.min(free, math.ceil(bytes / offer.slab_bytes) * offer.slab_bytes)
local granted_epoch = next_epoch()
local lease = open_lease({
  lease_id = draw_id('{aqua}:lease:', 'lease-', ARGV[4]), state = 'granted',
  epoch = granted_epoch, granted_epoch = granted_epoch, producer_id = producer_id,
  consumer_id = consumer_id, ttl_us = math.floor(request.ttl_s * 1000000 + 0.5),
  granted_bytes = granted,
})
list_lease(lease)
book(lease, granted)
local attach_us = tonumber(ARGV[3])
set_deadline(lease, clock_us + attach_us)
save(lease)

local answer = table.concat({
  lease.lease_id, integer(granted_epoch), producer_id, offer.incarnation, consumer_id,
  integer(granted), integer(attach_us), integer(now_us + attach_us), offer.transport,
  integer(offer.slab_bytes), offer.endpoint,
}, '\n')
keep_answer(idempotency_key, ARGV[1], answer)
return {'ok', books_id, answer}

end)
register('lose_silent_members', {}, function(KEYS, ARGV)
-- One step of the sweep: members that have said nothing for too long leave the books.
--
-- ARGV[1]  silent_s: silence allowed, in microseconds of the books' clock
-- ARGV[2]  limit: how many leases and members at most
-- Calls    integer, leases_on, step, save, settle, forget_producer, offer_of, forget_consumer
-- Result   {'ok', steps}: leases and members handled; as many as allowed means there may be more
--
-- A lost producer's leases are LOST with it. A lost consumer's leases live on until they expire:
-- it may still be using them, and it is the producer who sees it die.

local horizon = integer(clock_us - tonumber(ARGV[1]))
local allowed, steps, gone = tonumber(ARGV[2]), 0, {}
for _, producer_id in ipairs(redis.call('ZRANGEBYSCORE', '{aqua}:producers_seen', '-inf', horizon,
    'LIMIT', 0, allowed)) do
  for _, lease in ipairs(leases_on('{aqua}:producer_leases:', 'producer_id', producer_id, false,
      allowed - steps)) do
    step(lease, 'producer_lost', 'producer_lost')
    save(lease)
    steps = steps + 1
  end
  if steps >= allowed then
    break
  end
  gone[#gone + 1] = producer_id
  steps = steps + 1
end
settle()
for _, producer_id in ipairs(gone) do
  forget_producer(producer_id, offer_of(producer_id).domain)
end
for _, consumer_id in ipairs(redis.call('ZRANGEBYSCORE', '{aqua}:consumers_seen', '-inf', horizon,
    'LIMIT', 0, allowed - steps)) do
  forget_consumer(consumer_id)
  steps = steps + 1
end
return {'ok', steps}

end)
register('open_reclaim', {}, function(KEYS, ARGV)
-- An operator asks a producer to take memory back; the producer learns of it in its next answer.
--
-- ARGV[1]  request: a ReclaimRequest as JSON
-- ARGV[2]  idempotency_key
-- ARGV[3]  seed: random, what the reclaim's id is drawn from
-- Calls    first_answer, reclaim_row, refuse, offer_of, draw_id, integer, next_epoch, keep_answer,
--          emit
-- Result   {'ok', row}, see reclaim_row
-- Refuses  idempotency_conflict, unknown_resource, request_invalid, capacity_exhausted

local idempotency_key = '{aqua}:idempotency:' .. 'reclaim:' .. ARGV[2]
local first, conflict = first_answer(idempotency_key, ARGV[1])
if conflict then
  return conflict
end
local row = first and reclaim_row(first)
if row then
  return {'ok', row}
end

local request = cjson.decode(ARGV[1])
local producer_id, bytes = request.producer_id, request.bytes
local offer = offer_of(producer_id)
if not offer.exists then
  return refuse('unknown_resource', 'there is no producer ' .. producer_id,
    'producer_id', producer_id)
end
if bytes > offer.offered then
  return refuse('request_invalid', 'a producer cannot take back more than it offers',
    'offered_bytes', integer(offer.offered))
end
if redis.call('ZCARD', '{aqua}:producer_reclaims:' .. producer_id) >= 32 then
  return refuse('capacity_exhausted', 'the producer has as many reclaims open as it can report',
    'producer_id', producer_id)
end

local order = integer(next_epoch())
local reclaim_id = draw_id('{aqua}:reclaim:', 'reclaim-', ARGV[3])
redis.call('HSET', '{aqua}:reclaim:' .. reclaim_id, 'producer_id', producer_id, 'origin', 'operator',
  'order', order, 'done', '0', 'taken_up', '0', 'requested_bytes', integer(bytes),
  'returned_bytes', '0', 'deadline_s', tostring(request.deadline_s), 'escalated', '0',
  'first_slab_ms', '', 'total_ms', '')
redis.call('ZADD', '{aqua}:reclaims', order, reclaim_id)
redis.call('ZADD', '{aqua}:producer_reclaims:' .. producer_id, order, reclaim_id)
keep_answer(idempotency_key, ARGV[1], reclaim_id)
emit('reclaim_opened', producer_id, nil, nil, nil, bytes)
return {'ok', reclaim_row(reclaim_id)}

end)
register('put_placements', {}, function(KEYS, ARGV)
-- Replace the placer's plan as a whole.
--
-- ARGV[1]  plan: a PlacementPlan as JSON
-- Calls    enlist, emit
-- Result   {'ok', pairings}: how many

local plan = cjson.decode(ARGV[1])
redis.call('DEL', '{aqua}:placements', '{aqua}:placement_reasons', '{aqua}:placement_names')
for _, pairing in ipairs(plan.pairings) do
  enlist('{aqua}:placement_names', pairing.consumer_id, 0)
  redis.call('HSET', '{aqua}:placements', pairing.consumer_id, table.concat(pairing.producers, ' '))
  if pairing.reason ~= '' then
    redis.call('HSET', '{aqua}:placement_reasons', pairing.consumer_id, pairing.reason)
  end
end
redis.call('HSET', KEYS[1], 'plan_hash', plan.plan_hash,
  'planned', #plan.pairings > 0 and '1' or '0')
emit('placement_changed')
return {'ok', #plan.pairings}

end)
register('put_profile', {}, function(KEYS, ARGV)
-- Keep a model's profile; the one before is replaced.
--
-- ARGV[1]  model
-- ARGV[2]  profile: a ModelProfile as JSON
-- Calls    refuse
-- Result   {'ok'}
-- Refuses  capacity_exhausted

if redis.call('HEXISTS', '{aqua}:profiles', ARGV[1]) == 0
    and redis.call('HLEN', '{aqua}:profiles') >= 1000 then
  return refuse('capacity_exhausted', 'no more than ' .. 1000 .. ' models are kept')
end
redis.call('HSET', '{aqua}:profiles', ARGV[1], ARGV[2])
return {'ok'}

end)
register('read_books', {'no-writes'}, function(KEYS, ARGV)
-- The books as a whole: counts, and sums over a part of the members, the parts one after the other.
--
-- ARGV[1]  producers_after: go on after this name; '' from the start
-- ARGV[2]  consumers_after: the same
-- ARGV[3]  limit: how many of each role at most
-- Calls    whole, counts_in
-- Result   {'ok', books_id, {what, count, ...}, {what, sum, ...}, producers_after,
--           consumers_after}: where to go on, the last names again at the end
--            counts: all members, silence_us of the one heard longest ago, open reclaims, leases that
--                    are rightful, records set aside since the books were made, and how long the
--                    clock stood, stood_{reason}_us
--            sums: what the part's members offer, have on lease, and want, and their leases by state,
--                  those in the initial one left out
-- @flags no-writes

local sums = {}
local function sum(what, value)
  sums[what] = (sums[what] or 0) + (whole(value) or 0)
end

-- Where to go on after adding up these fields of a page of members.
local function add_up(after, index, prefix, ...)
  local names = redis.call('ZRANGEBYLEX', index, after == '' and '-' or '(' .. after, '+',
    'LIMIT', 0, tonumber(ARGV[3]))
  for _, name in ipairs(names) do
    local row = redis.call('HMGET', prefix .. name, ...)
    for position, field in ipairs({...}) do
      if field == 'states' then
        for state, number in pairs(counts_in(row[position])) do
          sum(state, number)
        end
      else
        sum(field, row[position])
      end
    end
  end
  return names[#names] or after
end

local counts = {}
local function count(what, number)
  counts[#counts + 1] = what
  counts[#counts + 1] = number
end

for _, reason in ipairs({'absence', 'refusal', 'silence'}) do
  count('stood_' .. reason .. '_us',
    whole(redis.call('HGET', KEYS[1], 'stood_' .. reason .. '_us')) or 0)
end
count('quarantined', whole(redis.call('HGET', KEYS[1], 'quarantined')) or 0)
count('rightful', redis.call('ZCARD', '{aqua}:deadlines'))
count('reclaims', redis.call('ZCARD', '{aqua}:reclaims') - redis.call('ZCARD', '{aqua}:ended_reclaims'))
for role, keys in pairs({
  producer = {'{aqua}:producers', '{aqua}:producers_seen'}, consumer = {'{aqua}:consumers', '{aqua}:consumers_seen'},
}) do
  local oldest = redis.call('ZRANGE', keys[2], 0, 0, 'WITHSCORES')
  count(role, redis.call('ZCARD', keys[1]))
  count(role .. '_silence_us', oldest[2] and clock_us - tonumber(oldest[2]) or 0)
end
local producers_after = add_up(ARGV[1], '{aqua}:producers', '{aqua}:producer:',
  'offered_bytes', 'leased_bytes', 'queue_length', 'states')
local consumers_after = add_up(ARGV[2], '{aqua}:consumers', '{aqua}:consumer:',
  'wanted_bytes', 'spilled_bytes')
local flat = {}
for what, total in pairs(sums) do
  flat[#flat + 1] = what
  flat[#flat + 1] = total
end
return {'ok', books_id, counts, flat, producers_after, consumers_after}

end)
register('read_consumers', {'no-writes'}, function(KEYS, ARGV)
-- A page of consumers in the order of their names, or one consumer.
--
-- ARGV[1]  cursor: go on after this name; '' from the start
-- ARGV[2]  limit: how many at most
-- ARGV[3]  consumer_id: only this one, or ''
-- Calls    member_rows
-- Result   {'ok', rows}
--            row {consumer_id, silent_us, node, domain, gpu_uuid, model, wanted_bytes,
--                 spilled_bytes, leased_bytes}
-- @flags no-writes

return {'ok', member_rows(ARGV, '{aqua}:consumers', '{aqua}:consumers_seen', '{aqua}:consumer:',
  'node', 'domain', 'gpu_uuid', 'model', 'wanted_bytes', 'spilled_bytes', 'leased_bytes')}

end)
register('read_leases', {'no-writes'}, function(KEYS, ARGV)
-- A page of the booked leases, by producer and then in the order of their grants; or one lease,
-- booked or ended.
--
-- ARGV[1]  cursor: `producer@epoch` to go on with this producer after this epoch; '' to start
-- ARGV[2]  limit: how many at most
-- ARGV[3]  lease_id: only this one, or ''
-- ARGV[4]  state: only in this, or ''
-- ARGV[5]  producer_id: only of this one, or ''
-- ARGV[6]  consumer_id: only of this one, or ''
-- Calls    lease_of, lease_row
-- Result   {'ok', rows, cursor}: see lease_row; where to go on, '' at the end
--
-- A filter may leave a page short, or empty, with more to come: the scan is bounded, not the page.
-- @flags no-writes

local rows, limit, scanned = {}, tonumber(ARGV[2]), 0
if ARGV[3] ~= '' then
  local lease = lease_of(ARGV[3])
  return {'ok', lease and {lease_row(lease)} or {}, ''}
end

local function wanted(lease)
  return (ARGV[4] == '' or lease.state == ARGV[4])
    and (ARGV[6] == '' or lease.consumer_id == ARGV[6])
end

local producer_id, after = string.match(ARGV[1], '^(.+)@(.+)$')
if producer_id then
  after = '(' .. after
else
  producer_id = ARGV[5] ~= '' and ARGV[5]
    or redis.call('ZRANGEBYLEX', '{aqua}:producers', '-', '+', 'LIMIT', 0, 1)[1]
  after = '-inf'
end
while producer_id do
  local names = redis.call('ZRANGEBYSCORE', '{aqua}:producer_leases:' .. producer_id, after, '+inf',
    'WITHSCORES', 'LIMIT', 0, 1000 - scanned)
  for index = 1, #names, 2 do
    local lease = lease_of(names[index])
    if lease and wanted(lease) then
      rows[#rows + 1] = lease_row(lease)
    end
    scanned = scanned + 1
    if #rows == limit or scanned == 1000 then
      return {'ok', rows, producer_id .. '@' .. names[index + 1]}
    end
  end
  scanned = scanned + 1
  if ARGV[5] ~= '' then
    break
  end
  if scanned >= 1000 then
    return {'ok', rows, producer_id .. '@+inf'}
  end
  producer_id = redis.call('ZRANGEBYLEX', '{aqua}:producers', '(' .. producer_id, '+', 'LIMIT', 0, 1)[1]
  after = '-inf'
end
return {'ok', rows, ''}

end)
register('read_placements', {'no-writes'}, function(KEYS, ARGV)
-- A page of the placer's plan in force, by the consumer's name.
--
-- ARGV[1]  cursor: go on after this name; '' from the start
-- ARGV[2]  limit: how many pairings at most
-- Result   {'ok', plan_hash, pairings, {row, ...}, cursor}: pairings of the whole plan, how many;
--           where to go on, '' at the end
--            row {consumer_id, producers, reason}
-- @flags no-writes

local names, rows = redis.call('ZRANGEBYLEX', '{aqua}:placement_names',
  ARGV[1] == '' and '-' or '(' .. ARGV[1], '+', 'LIMIT', 0, tonumber(ARGV[2])), {}
for _, name in ipairs(names) do
  rows[#rows + 1] = {name, redis.call('HGET', '{aqua}:placements', name),
    redis.call('HGET', '{aqua}:placement_reasons', name) or ''}
end
return {'ok', redis.call('HGET', KEYS[1], 'plan_hash') or '',
  redis.call('ZCARD', '{aqua}:placement_names'), rows,
  #names == tonumber(ARGV[2]) and names[#names] or ''}

end)
register('read_producers', {'no-writes'}, function(KEYS, ARGV)
-- A page of producers in the order of their names, or one producer.
--
-- ARGV[1]  cursor: go on after this name; '' from the start
-- ARGV[2]  limit: how many at most
-- ARGV[3]  producer_id: only this one, or ''
-- Calls    member_rows
-- Result   {'ok', rows}
--            row {producer_id, silent_us, node, domain, gpu_uuid, model, endpoint, transport,
--                 slab_bytes, offered_bytes, leased_bytes, grantable, queue_length}
-- @flags no-writes

return {'ok', member_rows(ARGV, '{aqua}:producers', '{aqua}:producers_seen', '{aqua}:producer:',
  'node', 'domain', 'gpu_uuid', 'model', 'endpoint', 'transport', 'slab_bytes', 'offered_bytes',
  'leased_bytes', 'grantable', 'queue_length')}

end)
register('read_profiles', {'no-writes'}, function(KEYS, ARGV)
-- A page of the profiles of models, by the model's name, or one.
--
-- ARGV[1]  cursor: go on after this model; '' from the start
-- ARGV[2]  limit: how many at most
-- ARGV[3]  model: only this one, or ''
-- Result   {'ok', {profile, ...}}, each JSON
-- @flags no-writes

-- Few enough to be sorted here: `put_profile` keeps to a bound.
local models, profiles = redis.call('HKEYS', '{aqua}:profiles'), {}
table.sort(models)
for _, model in ipairs(models) do
  if (ARGV[3] == '' and model > ARGV[1] or ARGV[3] == model) and #profiles < tonumber(ARGV[2]) then
    profiles[#profiles + 1] = redis.call('HGET', '{aqua}:profiles', model)
  end
end
return {'ok', profiles}

end)
register('read_reclaims', {'no-writes'}, function(KEYS, ARGV)
-- A page of reclaims in the order they were opened, or one reclaim.
--
-- ARGV[1]  cursor: go on after this position; '' from the start
-- ARGV[2]  limit: how many at most
-- ARGV[3]  reclaim_id: only this one, or ''
-- Calls    reclaim_row
-- Result   {'ok', rows, next}: see reclaim_row; where to go on, '' at the end
-- @flags no-writes

local rows = {}
if ARGV[3] ~= '' then
  return {'ok', {reclaim_row(ARGV[3])}, ''}
end
local names = redis.call('ZRANGEBYSCORE', '{aqua}:reclaims', ARGV[1] == '' and '-inf' or '(' .. ARGV[1],
  '+inf', 'WITHSCORES', 'LIMIT', 0, tonumber(ARGV[2]))
for index = 1, #names, 2 do
  rows[#rows + 1] = reclaim_row(names[index])
end
return {'ok', rows, #names == 2 * tonumber(ARGV[2]) and names[#names] or ''}

end)
register('release_lease', {}, function(KEYS, ARGV)
-- The consumer gives up its right. Harmless when repeated, under any epoch the lease has had.
--
-- ARGV[1]  lease_id
-- ARGV[2]  epoch
-- ARGV[3]  as_consumer: whom the caller's token is bound to, or ''
-- ARGV[4]  failure: why it could not be attached, or ''
-- ARGV[5]  voice: the caller's token; '' where there are no tokens
-- Calls    lease_of, why_not_act, note_failure, step, save, lease_row
-- Result   {'ok', row}, see lease_row
-- Refuses  unknown_resource, forbidden, stale_epoch

local lease = lease_of(ARGV[1])
local refusal = why_not_act(lease, ARGV[1], ARGV[3], tonumber(ARGV[2]))
if refusal then
  return refusal
end
if (ARGV[4] or '') ~= '' then
  note_failure(lease, ARGV[4], ARGV[5])
end
local released = step(lease, 'release', 'released')
assert(released, 'a lease that cannot be released: ' .. lease.state)
save(lease)
return {'ok', lease_row(lease)}

end)
register('remove_consumer', {}, function(KEYS, ARGV)
-- A consumer takes its leave and gives up whatever right it still has.
--
-- ARGV[1]  consumer_id
-- ARGV[2]  incarnation
-- Calls    member_of, refuse, leases_on, step, save, forget_consumer
-- Result   {'ok'}
-- Refuses  unknown_resource, stale_revision

local consumer_id, incarnation = ARGV[1], ARGV[2]
local known = member_of('{aqua}:consumer:' .. consumer_id)
if not known.incarnation then
  return refuse('unknown_resource', 'there is no consumer ' .. consumer_id,
    'consumer_id', consumer_id)
end
if known.incarnation ~= incarnation then
  return refuse('stale_revision', 'another life of this consumer is in the books',
    'consumer_id', consumer_id, 'incarnation', incarnation)
end
for _, lease in ipairs(leases_on('{aqua}:consumer_leases:', 'consumer_id', consumer_id)) do
  step(lease, 'release', 'released')
  save(lease)
end
forget_consumer(consumer_id)
return {'ok'}

end)
register('remove_producer', {}, function(KEYS, ARGV)
-- A producer takes its leave. Refused while slabs are out: they would be lost to the books.
--
-- ARGV[1]  producer_id
-- ARGV[2]  incarnation
-- Calls    member_of, refuse, leases_on, step, save, settle, forget_producer
-- Result   {'ok'}
-- Refuses  unknown_resource, stale_revision, invalid_transition

local producer_id, incarnation = ARGV[1], ARGV[2]
local known = member_of('{aqua}:producer:' .. producer_id)
if not known.incarnation then
  return refuse('unknown_resource', 'there is no producer ' .. producer_id,
    'producer_id', producer_id)
end
if known.incarnation ~= incarnation then
  return refuse('stale_revision', 'another life of this producer is in the books',
    'producer_id', producer_id, 'incarnation', incarnation)
end
local booked = leases_on('{aqua}:producer_leases:', 'producer_id', producer_id)
for _, lease in ipairs(booked) do
  if lease.state ~= 'granted' then
    return refuse('invalid_transition', 'consumers still hold slabs of this producer',
      'producer_id', producer_id, 'lease_id', lease.lease_id, 'state', lease.state)
  end
end
for _, lease in ipairs(booked) do
  step(lease, 'reclaim', 'withdrawn')
  save(lease)
end
settle()
forget_producer(producer_id, known.domain)
return {'ok'}

end)
register('renew_lease', {}, function(KEYS, ARGV)
-- Start a lease's time to live anew.
--
-- ARGV[1]  lease_id
-- ARGV[2]  epoch
-- ARGV[3]  ttl_s, in microseconds
-- ARGV[4]  as_consumer: whom the caller's token is bound to, or ''
-- Calls    lease_of, why_not_act, refuse, step, write_lease, prolong, lease_row
-- Result   {'ok', row}, see lease_row
-- Refuses  unknown_resource, forbidden, stale_epoch, lease_lost, invalid_transition

local lease = lease_of(ARGV[1])
local named_epoch = tonumber(ARGV[2])
local refusal = why_not_act(lease, ARGV[1], ARGV[4], named_epoch)
if refusal then
  return refusal
end
if named_epoch ~= lease.epoch then
  return refuse('stale_epoch', 'the right to the lease has ended: ' .. lease.reason,
    'lease_id', ARGV[1], 'state', lease.state)
end
if not BOOKED[lease.state] then
  return refuse('lease_lost', 'the lease has ended: ' .. lease.reason,
    'lease_id', ARGV[1], 'state', lease.state)
end
if not step(lease, 'renew') then
  return refuse('invalid_transition', 'a lease that is ' .. lease.state .. ' cannot be renewed',
    'lease_id', ARGV[1], 'state', lease.state)
end
lease.ttl_us = tonumber(ARGV[3])
write_lease(lease)
if lease.state ~= 'granted' then
  prolong(lease)
end
return {'ok', lease_row(lease)}

end)
register('report_consumer', {}, function(KEYS, ARGV)
-- Book a consumer's full state; every lease it names is renewed.
--
-- ARGV[1]  report: a ConsumerReport as JSON, without nulls
-- Calls    member_of, why_stale, load_leases, lease_of, is_borne_out, refuse, whole, integer,
--          retire, emit, step, prolong, terms_of, largest, pairing_of
-- Result   {'ok', books_id, available_bytes, ended}
--            ended {{lease_id, epoch, reason}, ...}: leases named in the report whose right is over
-- Refuses  stale_revision, protocol_violation
--
-- A lease that is GRANTED is not prolonged: the time for attaching runs from the grant. A lease
-- that the books do not know may be one of lost books, whose producer has not reported yet, so it
-- is called ended only when the consumer has named it for a while.

local report = cjson.decode(ARGV[1])
local fingerprint = redis.sha1hex(ARGV[1])
local consumer_id = report.consumer_id
local key = '{aqua}:consumer:' .. consumer_id
local known = member_of(key)

local refusal = why_stale(known, consumer_id, report.incarnation, report.revision, fingerprint)
if refusal then
  return refusal
end
local lease_ids = {}
for index, used in ipairs(report.leases) do
  lease_ids[index] = used.lease_id
end
load_leases(lease_ids)
for _, used in ipairs(report.leases) do
  local lease = lease_of(used.lease_id)
  if lease and lease.consumer_id ~= consumer_id and is_borne_out(lease) then
    return refuse('protocol_violation', 'the lease belongs to another consumer',
      'lease_id', used.lease_id)
  end
end

local leased = 0
for index, bytes in ipairs(redis.call('ZRANGE', '{aqua}:consumer_leases:' .. consumer_id, 0, -1,
    'WITHSCORES')) do
  leased = leased + (index % 2 == 0 and whole(bytes) or 0)
end
local reborn = known.incarnation and known.incarnation ~= report.incarnation
redis.call('HSET', key,
  'incarnation', report.incarnation, 'revision', integer(report.revision),
  'fingerprint', fingerprint,
  'retired', reborn and retire(known) or known.retired,
  'node', report.node, 'domain', report.domain, 'gpu_uuid', report.gpu_uuid,
  'model', report.model or '', 'wanted_bytes', integer(report.wanted_bytes),
  'spilled_bytes', integer(report.spilled_bytes), 'leased_bytes', integer(leased))
redis.call('ZADD', '{aqua}:consumers_seen', integer(clock_us), consumer_id)
redis.call('ZADD', '{aqua}:consumers', 0, consumer_id)
if not known.incarnation then
  emit('consumer_joined', nil, consumer_id)
end

-- Leases that the books do not know, and when the consumer named each of them first: one record with
-- a bounded number of them, those of this report.
local function claims_in(text)
  local claims = {}
  for lease_id, since_us in string.gmatch(text or '', '(%S+) (%d+)') do
    claims[lease_id] = whole(since_us)
  end
  return claims
end

local ended, kept, claims = {}, {}, nil
local patience_us = math.max(30000000, 3 * spread_us)
for _, used in ipairs(report.leases) do
  local lease = lease_of(used.lease_id)
  if not lease then
    claims = claims or claims_in(redis.call('GET', '{aqua}:claims:' .. consumer_id))
    local since_us = claims[used.lease_id] or clock_us
    if clock_us - since_us > patience_us then
      ended[#ended + 1] = {used.lease_id, used.epoch, 'unknown'}
    end
    if #kept < 256 then
      kept[#kept + 1] = used.lease_id .. ' ' .. integer(since_us)
    end
  elseif not RIGHTFUL[lease.state] or used.epoch ~= lease.epoch then
    local reason = RIGHTFUL[lease.state] and 'stale_epoch' or lease.reason
    ended[#ended + 1] = {used.lease_id, lease.epoch, reason}
  else
    step(lease, 'renew')
    if lease.state ~= 'granted' then
      prolong(lease)
    end
  end
end

if claims then
  redis.call('SET', '{aqua}:claims:' .. consumer_id, table.concat(kept, '\n'),
    'PX', integer(patience_us / 500))
end

local terms = terms_of({}, known.avoided)
terms.takes_suspected = true
local _, available = largest(report.domain, pairing_of(consumer_id), terms)
return {'ok', books_id, available, ended}

end)
register('report_producer', {}, function(KEYS, ARGV)
-- Book a producer's full state: registration, heartbeat and every change of its leases.
--
-- ARGV[1]  report: a ProducerReport as JSON, without nulls
-- ARGV[2]  verdicts: '' at first; then bytes granted by the proof of each lease asked for, as JSON
-- Calls    offer_of, member_of, why_stale, refuse, leases_on, load_leases, lease_of, is_borne_out,
--          drop_lease, integer, is_name, drop_reclaim, list_lease, count, step, save, retire, emit,
--          open_lease, prolong, book, next_epoch, close_reclaim, whole, is_decimal
-- Result   {'ok', books_id, min_epoch, grantable, ended, orders, attached_us, reclaimed}
--            ended       {{lease_id, epoch, reason}, ...}: rights that are over, still held
--            orders      {{reclaim_id, bytes, deadline_s}, ...}: operators' orders, not yet taken up
--            attached_us {us, ...}: time from grant to attachment, for leases attached now
--            reclaimed   {{outcome, total_ms or ''}, ...}: reclaims closed now
--          {'ok', asked}: nothing is written yet; leases whose proofs have to be checked before
-- Refuses  stale_revision, stale_epoch, protocol_violation
--
-- The books follow the report. A lease that is GRANTED and not mentioned stays: the report may be
-- older than the grant. Any other lease that is not mentioned is back. A lease that the books hold
-- ended is adopted, and so is one that they do not know, if its proof is good; not more than some
-- hundred in one report. What is not proven, or more than was granted, is booked as the producer's
-- own: under no lease, in no consumer's name. If the offer no longer covers everything, grants that
-- no consumer has attached to yet go, newest first; what is held fits by the schema.
--
-- Of the books' own knowledge of this producer only the records of its leases count. Its sums and
-- lists are made anew from them, so what was lost or damaged there is whole again after a report.

local report = cjson.decode(ARGV[1])
local fingerprint = redis.sha1hex(ARGV[1])
local producer_id = report.producer_id
local key = '{aqua}:producer:' .. producer_id
local offer = offer_of(producer_id)
local known = member_of(key)

-- Everything is checked before anything is written.
local refusal = why_stale(known, producer_id, report.incarnation, report.revision, fingerprint)
if refusal then
  return refusal
end
local reborn = known.incarnation and known.incarnation ~= report.incarnation
if known.incarnation and not reborn and known.slab_bytes ~= report.slab_bytes then
  return refuse('protocol_violation', 'slab_bytes is fixed for the life of a producer',
    'producer_id', producer_id)
end
local booked = leases_on('{aqua}:producer_leases:', 'producer_id', producer_id, true)
local named, lease_ids = {}, {}
for index, held in ipairs(report.leases) do
  named[held.lease_id], lease_ids[index] = true, held.lease_id
end
load_leases(lease_ids)
local verdicts, asked = ARGV[2] ~= '' and cjson.decode(ARGV[2]), {}
for _, held in ipairs(report.leases) do
  local lease_id, lease = held.lease_id, lease_of(held.lease_id)
  local is_others = lease
    and (lease.producer_id ~= producer_id or lease.consumer_id ~= held.consumer_id)
  local is_stale = lease and (held.epoch < lease.granted_epoch or held.epoch > lease.epoch)
  if (is_others or is_stale) and not is_borne_out(lease) then
    lease, is_others, is_stale = false, false, false
  end
  if (not lease or is_others or is_stale) and held.proof and not verdicts then
    asked[#asked + 1] = #asked < 256 and lease_id or nil
  elseif (is_others or is_stale) and verdicts and (verdicts[lease_id] or 0) > 0 then
    drop_lease(lease_id, 'is not what the proof of its grant says', lease.producer_id)
  elseif is_others then
    return refuse('protocol_violation', 'the lease belongs to others', 'lease_id', lease_id)
  elseif is_stale then
    return refuse('stale_epoch', 'the lease never had this epoch', 'lease_id', lease_id,
      'epoch', integer(held.epoch))
  end
end
for _, reclaim in ipairs(report.reclaims) do
  local owner = redis.call('HGET', '{aqua}:reclaim:' .. reclaim.reclaim_id, 'producer_id')
  if owner and owner ~= producer_id then
    if is_name(owner) then
      return refuse('protocol_violation', 'the reclaim belongs to another producer',
        'reclaim_id', reclaim.reclaim_id)
    end
    drop_reclaim(reclaim.reclaim_id, producer_id)
  end
end

if #asked > 0 then
  return {'ok', asked}
end

-- What the books have of it.
local listed, kept = {}, {}
for _, lease in ipairs(booked) do
  if lease_of(lease.lease_id) == lease then
    listed[lease.lease_id] = true
    kept[#kept + 1] = lease
  end
end
booked = kept
for _, lease_id in ipairs(lease_ids) do
  local lease = lease_of(lease_id)
  if lease and BOOKED[lease.state] and not listed[lease_id] then
    list_lease(lease)
    booked[#booked + 1] = lease
  end
end
offer.leased, offer.counts = 0, {}
for _, lease in ipairs(booked) do
  offer.leased = offer.leased + lease.bytes
  count(offer, lease.state, 1)
end

-- A new life of the process: nothing of the old one is left to hold.
local reborn = known.incarnation and known.incarnation ~= report.incarnation
if reborn then
  for _, lease in ipairs(booked) do
    step(lease, 'producer_lost', 'producer_restarted')
    save(lease)
  end
  redis.call('HDEL', key, 'unreachable')
end
if known.domain and known.domain ~= report.domain then
  redis.call('ZREM', '{aqua}:free:' .. known.domain, producer_id)
  redis.call('SREM', '{aqua}:unconfirmed:' .. known.domain, producer_id)
end

local grantable = report.books_id == books_id
offer.exists, offer.domain, offer.grantable = true, report.domain, grantable
-- What grants read comes first: a small hash is searched from its beginning.
redis.call('HSET', key,
  'offered_bytes', integer(report.offered_bytes), 'leased_bytes', integer(offer.leased),
  'domain', report.domain, 'grantable', grantable and '1' or '0',
  'slab_bytes', integer(report.slab_bytes), 'endpoint', report.endpoint,
  'transport', report.transport, 'incarnation', report.incarnation,
  'revision', integer(report.revision), 'fingerprint', fingerprint,
  'retired', reborn and retire(known) or known.retired,
  'node', report.node, 'gpu_uuid', report.gpu_uuid, 'model', report.model or '',
  'queue_length', report.load and integer(report.load.queue_length) or '')
redis.call('ZADD', '{aqua}:producers_seen', integer(clock_us), producer_id)
redis.call('ZADD', '{aqua}:producers', 0, producer_id)
if grantable then
  redis.call('SREM', '{aqua}:unconfirmed:' .. report.domain, producer_id)
else
  redis.call('SADD', '{aqua}:unconfirmed:' .. report.domain, producer_id)
end

if not known.incarnation then
  emit('producer_joined', producer_id, nil, nil, nil, report.offered_bytes)
elseif offer.offered ~= report.offered_bytes then
  emit('offer_changed', producer_id, nil, nil, nil, report.offered_bytes)
end
offer.offered = report.offered_bytes
offer.changed = true

-- What is held.
local own_bytes, ended, attached_us = 0, {}, {}

-- A lease that the books do not know, or nil: its bytes are the producer's own then.
local function adopted(held)
  local granted_bytes = verdicts and verdicts[held.lease_id]
  if granted_bytes and granted_bytes > 0 then
    -- Granted by books that are lost: the same as a lease of a producer that was lost.
    epoch, issued = math.max(epoch, held.epoch), true
    return open_lease({
      lease_id = held.lease_id, state = 'lost', epoch = held.epoch, granted_epoch = held.epoch,
      producer_id = producer_id, consumer_id = held.consumer_id, ttl_us = 30000000,
      granted_bytes = granted_bytes,
    })
  end
  own_bytes = own_bytes + held.held_bytes
  -- One that has a proof and was not asked for is for the next report.
  if granted_bytes or not held.proof then
    ended[#ended + 1] = {held.lease_id, held.epoch, 'unproven'}
  end
  return nil
end

local function book_held(lease, held)
  if not BOOKED[lease.state] then
    step(lease, 'adopt')
  elseif lease.state == 'granted' then
    step(lease, 'attach')
    prolong(lease)
    attached_us[#attached_us + 1] = clock_us - lease.granted_us
  end
  local bytes = math.min(held.held_bytes, lease.granted_bytes)
  own_bytes = own_bytes + held.held_bytes - bytes
  if bytes < lease.bytes then
    step(lease, 'return_some')
  end
  book(lease, bytes)
  if held.consumer_lost then
    step(lease, 'consumer_lost', 'consumer_lost')
  end
  if held.reclaiming_bytes > 0 then
    step(lease, 'reclaim')
  else
    step(lease, 'reclaim_done')
  end
  if not RIGHTFUL[lease.state] then
    ended[#ended + 1] = {lease.lease_id, lease.epoch, lease.reason}
  end
  save(lease)
end

for _, held in ipairs(report.leases) do
  local lease = lease_of(held.lease_id) or adopted(held)
  if lease then
    book_held(lease, held)
  end
end

-- What is back.
for _, lease in ipairs(booked) do
  if not named[lease.lease_id] and lease.state ~= 'granted' then
    step(lease, 'return_all', 'returned')
    save(lease)
  end
end

-- What no longer fits; `booked` is newest first.
offer.leased = offer.leased + own_bytes
if own_bytes ~= offer.unproven then
  redis.call('HSET', key, 'unproven_bytes', integer(own_bytes))
end
for _, lease in ipairs(booked) do
  if offer.leased <= offer.offered then
    break
  end
  if lease.state == 'granted' then
    step(lease, 'reclaim', 'withdrawn')
    save(lease)
  end
end

-- Reclaims: those of the report, then those that it has stopped naming, then orders not taken up.
local reclaimed, running = {}, {}
for _, reclaim in ipairs(report.reclaims) do
  local reclaim_id = reclaim.reclaim_id
  local reclaim_key = '{aqua}:reclaim:' .. reclaim_id
  local present = redis.call('HMGET', reclaim_key, 'origin', 'done')
  running[reclaim_id] = true
  if not present[1] then
    local order = integer(next_epoch())
    redis.call('HSET', reclaim_key, 'producer_id', producer_id, 'origin', 'producer',
      'order', order, 'done', '0')
    redis.call('ZADD', '{aqua}:reclaims', order, reclaim_id)
    redis.call('ZADD', '{aqua}:producer_reclaims:' .. producer_id, order, reclaim_id)
    emit('reclaim_opened', producer_id, nil, nil, nil, reclaim.requested_bytes)
  end
  if present[2] ~= '1' then
    redis.call('HSET', reclaim_key, 'taken_up', '1',
      'requested_bytes', integer(reclaim.requested_bytes),
      'returned_bytes', integer(reclaim.returned_bytes), 'deadline_s', tostring(reclaim.deadline_s),
      'escalated', reclaim.escalated and '1' or '0',
      'first_slab_ms', reclaim.first_slab_ms and tostring(reclaim.first_slab_ms) or '',
      'total_ms', reclaim.total_ms and tostring(reclaim.total_ms) or '')
    if reclaim.total_ms then
      local outcome = reclaim.escalated and 'escalated' or 'returned'
      close_reclaim(reclaim_id, producer_id, outcome)
      reclaimed[#reclaimed + 1] = {outcome, tostring(reclaim.total_ms)}
    end
  else
    -- Still named, so its record must outlive the naming, or it would be counted anew.
    redis.call('PEXPIRE', reclaim_key, 120000)
    redis.call('ZADD', '{aqua}:ended_reclaims', integer(now_us), reclaim_id)
  end
end
local orders = {}
for _, reclaim_id in ipairs(redis.call('ZRANGE', '{aqua}:producer_reclaims:' .. producer_id, 0, -1)) do
  if not running[reclaim_id] then
    local field = redis.call('HMGET', '{aqua}:reclaim:' .. reclaim_id,
      'taken_up', 'requested_bytes', 'deadline_s')
    if field[1] == '1' then
      close_reclaim(reclaim_id, producer_id, 'dropped')
      reclaimed[#reclaimed + 1] = {'dropped', ''}
    elseif whole(field[2]) and is_decimal(field[3]) then
      orders[#orders + 1] = {reclaim_id, tonumber(field[2]), field[3]}
    else
      drop_reclaim(reclaim_id, producer_id)
    end
  end
end

return {'ok', books_id, min_epoch, grantable and 1 or 0, ended, orders, attached_us, reclaimed}

end)
register('revoke_lease', {}, function(KEYS, ARGV)
-- An operator ends the right to a lease. Its bytes stay booked until the producer has them back.
--
-- ARGV[1]  lease_id
-- ARGV[2]  epoch
-- Calls    lease_of, why_not_act, step, refuse, save, lease_row
-- Result   {'ok', row}, see lease_row
-- Refuses  unknown_resource, stale_epoch, invalid_transition

local lease = lease_of(ARGV[1])
local refusal = why_not_act(lease, ARGV[1], '', tonumber(ARGV[2]))
if refusal then
  return refusal
end
if not step(lease, 'revoke', 'revoked') then
  return refuse('invalid_transition', 'a lease that is ' .. lease.state .. ' cannot be revoked',
    'lease_id', ARGV[1], 'state', lease.state)
end
save(lease)
return {'ok', lease_row(lease)}

end)
register('update_offer', {}, function(KEYS, ARGV)
-- Change a producer's offer between two reports; ordered by the same revision.
--
-- ARGV[1]  producer_id
-- ARGV[2]  update: an OfferUpdate as JSON
-- Calls    offer_of, member_of, integer, refuse, why_stale, leases_on, emit, step, save
-- Result   {'ok', producer_id, domain, offered_bytes, leased_bytes, grantable (1 or 0)}
-- Refuses  unknown_resource, stale_revision, request_invalid

local producer_id, update = ARGV[1], cjson.decode(ARGV[2])
local incarnation, revision, offered = update.incarnation, update.revision, update.offered_bytes
local key = '{aqua}:producer:' .. producer_id
local offer = offer_of(producer_id)
local known = member_of(key)
local fingerprint = 'offer ' .. integer(offered)
if not known.incarnation then
  return refuse('unknown_resource', 'there is no producer ' .. producer_id,
    'producer_id', producer_id)
end
if known.incarnation ~= incarnation then
  return refuse('stale_revision', 'the offer is of another life of this producer',
    'producer_id', producer_id, 'incarnation', incarnation)
end
local refusal = why_stale(known, producer_id, incarnation, revision, fingerprint)
if refusal then
  return refusal
end
if offered % known.slab_bytes ~= 0 then
  return refuse('request_invalid', 'offered_bytes must be a multiple of slab_bytes',
    'slab_bytes', integer(known.slab_bytes))
end

local granted, held = {}, offer.unproven
for _, lease in ipairs(leases_on('{aqua}:producer_leases:', 'producer_id', producer_id, true)) do
  if lease.state == 'granted' then
    granted[#granted + 1] = lease
  else
    held = held + lease.bytes
  end
end
if held > offered then
  return refuse('request_invalid', 'slabs that are lent stay under the offer until they are back',
    'held_bytes', integer(held))
end

redis.call('HSET', key, 'revision', integer(revision), 'fingerprint', fingerprint)
if offer.offered ~= offered then
  emit('offer_changed', producer_id, nil, nil, nil, offered)
end
offer.offered = offered
offer.changed = true
for _, lease in ipairs(granted) do
  if offer.leased > offered then
    step(lease, 'reclaim', 'withdrawn')
    save(lease)
  end
end
return {'ok', producer_id, offer.domain, offer.offered, offer.leased, offer.grantable and 1 or 0}

end)