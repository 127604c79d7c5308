-- Book a producer's full state: registration, heartbeat and every change of its leases.
--
-- ARGV[1]  report: a ProducerReport as JSON, without nulls
-- ARGV[2]  verdicts: '' at first; then bytes granted by the proof of each lease asked for, as JSON
-- ARGV[3]  as_tenant: whose the caller's token is, or ''
-- ARGV[4]  is_bound: 1 if it is bound to this member
-- Calls    offer_of, member_of, why_stale, refuse, tenant_in, leases_on, load_leases, lease_of,
--          is_borne_out, drop_lease, integer, is_name, drop_reclaim, list_lease, count, step, save,
--          retire, emit, open_lease, prolong, book, write_lease, next_epoch, close_reclaim, whole,
--          is_decimal, why_not_join
-- Result   {'ok', books_id, min_epoch, grantable, ended, orders, attached_us, reclaimed}
--            ended       {{lease_id, epoch, reason}, ...}: rights that are over, still held
--            orders      {{reclaim_id, bytes, deadline_s}, ...}: orders of operators to take up
--            attached_us {us, ...}: time from grant to attachment, for leases attached now
--            reclaimed   {{outcome, total_ms or '', first_slab_ms or ''}, ...}: reclaims closed now
--          {'ok', asked}: nothing is written yet; leases whose proofs have to be checked before
-- Refuses  stale_revision, stale_epoch, protocol_violation, forbidden, quota_exceeded
--
-- The books follow the report. A lease that is GRANTED and not mentioned stays: the report may be
-- older than the grant. Any other lease that is not mentioned is back. A lease that the books hold
-- ended is adopted, and so is one that they do not know, if its proof is good: not more than some
-- hundred in one report, and not at the cost of a grant if all of it is on its way back. What is
-- not proven, or more than was granted, is booked as the producer's own: under no lease, in no
-- consumer's name. If the offer no longer covers everything, grants that no consumer has attached
-- to yet go, newest first; what is held fits by the schema.
--
-- Of the books' own knowledge of this producer only the records of its leases count. Its sums and
-- lists are made anew from them, so what was lost or damaged there is whole again after a report.

local report, verdicts = cjson.decode(ARGV[1]), ARGV[2] ~= '' and cjson.decode(ARGV[2])
assert(not verdicts or type(verdicts) == 'table', 'verdicts are by lease')
local fingerprint = redis.sha1hex(ARGV[1])
local producer_id = report.producer_id
local key = KEY.producer .. producer_id
local offer = offer_of(producer_id)
local known = member_of(key)

-- Everything is checked before anything is written.
local tenant, refusal = tenant_in(known, producer_id, ARGV[3] or '', ARGV[4])
refusal = refusal
  or why_stale(known, producer_id, report.incarnation, report.revision, fingerprint)
  or why_not_join(known, producer_id, tenant)
if refusal then
  return refusal
end
local reborn = known.incarnation and known.incarnation ~= report.incarnation
if known.incarnation and not reborn and known.slab_bytes ~= report.slab_bytes then
  return refuse('protocol_violation', 'slab_bytes is fixed for the life of a producer',
    'producer_id', producer_id)
end
local booked = leases_on(KEY.producer_leases, 'producer_id', producer_id, true)
local named, lease_ids = {}, {}
for index, held in ipairs(report.leases) do
  named[held.lease_id], lease_ids[index] = true, held.lease_id
end
load_leases(lease_ids)
local asked = {}
for _, held in ipairs(report.leases) do
  local lease_id, lease = held.lease_id, lease_of(held.lease_id)
  local is_others = lease
    and (lease.producer_id ~= producer_id or lease.consumer_id ~= held.consumer_id)
  local is_stale = lease and (held.epoch < lease.granted_epoch or held.epoch > lease.epoch)
  if (is_others or is_stale) and not is_borne_out(lease) then
    lease, is_others, is_stale = false, false, false
  end
  if (not lease or is_others or is_stale) and held.proof and not verdicts then
    asked[#asked + 1] = #asked < CONST.max_adoptions and lease_id or nil
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
  local owner = redis.call('HGET', KEY.reclaim .. reclaim.reclaim_id, 'producer_id')
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
if reborn then
  for _, lease in ipairs(booked) do
    step(lease, EVENT.producer_lost, 'producer_restarted')
    save(lease)
  end
  redis.call('HDEL', key, 'unreachable')
end
if known.domain and known.domain ~= report.domain then
  redis.call('ZREM', KEY.free .. known.domain, producer_id)
  redis.call('SREM', KEY.unconfirmed .. known.domain, producer_id)
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
  'queue_length', report.load and integer(report.load.queue_length) or '',
  'memory_total_bytes', report.load and integer(report.load.memory_total_bytes) or '')
redis.call('ZADD', KEY.producers_seen, integer(clock_us), producer_id)
redis.call('ZADD', KEY.producers, 0, producer_id)
if tenant ~= '' then
  redis.call('HSET', key, 'tenant', tenant)
  redis.call('ZADD', KEY.producers_of .. tenant, 0, producer_id)
  offer.tenant = tenant
end
if grantable then
  redis.call('SREM', KEY.unconfirmed .. report.domain, producer_id)
else
  redis.call('SADD', KEY.unconfirmed .. report.domain, producer_id)
end

if not known.incarnation then
  emit(KIND.producer_joined, producer_id, nil, nil, nil, report.offered_bytes)
elseif offer.offered ~= report.offered_bytes then
  emit(KIND.offer_changed, producer_id, nil, nil, nil, report.offered_bytes)
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
      lease_id = held.lease_id, state = STATE.lost, epoch = held.epoch, granted_epoch = held.epoch,
      producer_id = producer_id, consumer_id = held.consumer_id, ttl_us = CONST.adopted_ttl_us,
      granted_bytes = granted_bytes,
      tenant = redis.call('HGET', KEY.consumer .. held.consumer_id, 'tenant') or '',
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
    step(lease, EVENT.adopt)
  elseif lease.state == STATE.granted then
    step(lease, EVENT.attach)
    prolong(lease)
    attached_us[#attached_us + 1] = clock_us - lease.granted_us
  end
  local bytes = math.min(held.held_bytes, lease.granted_bytes)
  own_bytes = own_bytes + held.held_bytes - bytes
  if bytes < lease.bytes then
    step(lease, EVENT.return_some)
  end
  book(lease, bytes)
  if held.consumer_lost then
    step(lease, EVENT.consumer_lost, 'consumer_lost')
  end
  if held.reclaiming_bytes > 0 then
    step(lease, EVENT.reclaim)
  else
    step(lease, EVENT.reclaim_done)
  end
  if not RIGHTFUL[lease.state] then
    ended[#ended + 1] = {lease.lease_id, lease.epoch, lease.reason}
  end
  save(lease)
end

-- Held after its right had ended, and all on its way back: a lease that came and went between two
-- reports is told so as well, also when its record has expired or is lost. It does not push out the
-- right of who was granted its bytes since.
local late = {}
for _, held in ipairs(report.leases) do
  local lease = lease_of(held.lease_id)
  local is_over = lease and lease.state == STATE.released
    or not lease and verdicts and (verdicts[held.lease_id] or 0) > 0
  if is_over and held.reclaiming_bytes == held.held_bytes then
    late[#late + 1] = held
  else
    lease = lease or adopted(held)
    if lease then
      book_held(lease, held)
    end
  end
end

-- What is back.
for _, lease in ipairs(booked) do
  if not named[lease.lease_id] and lease.state ~= STATE.granted then
    step(lease, EVENT.return_all, 'returned')
    save(lease)
  end
end
for _, held in ipairs(late) do
  local lease = lease_of(held.lease_id)
  if offer.leased + own_bytes + held.held_bytes <= offer.offered then
    book_held(lease or adopted(held), held)
  elseif lease then
    write_lease(lease)  -- As long as it is named, its record does not expire.
    ended[#ended + 1] = {lease.lease_id, lease.epoch, lease.reason}
  else
    ended[#ended + 1] = {held.lease_id, held.epoch, 'released'}
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
  if lease.state == STATE.granted then
    step(lease, EVENT.reclaim, 'withdrawn')
    save(lease)
  end
end

-- Reclaims: those of the report, then those that it has stopped naming, then orders not taken up.
local reclaimed, running = {}, {}
for _, reclaim in ipairs(report.reclaims) do
  local reclaim_id = reclaim.reclaim_id
  local reclaim_key = KEY.reclaim .. reclaim_id
  local present = redis.call('HMGET', reclaim_key, 'origin', 'done')
  running[reclaim_id] = true
  if not present[1] then
    local order = integer(next_epoch())
    redis.call('HSET', reclaim_key, 'producer_id', producer_id, 'origin', 'producer',
      'order', order, 'done', '0')
    redis.call('ZADD', KEY.reclaims, order, reclaim_id)
    redis.call('ZADD', KEY.producer_reclaims .. producer_id, order, reclaim_id)
    emit(KIND.reclaim_opened, producer_id, nil, nil, nil, reclaim.requested_bytes, tenant)
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
      reclaimed[#reclaimed + 1] = {outcome, tostring(reclaim.total_ms),
        reclaim.first_slab_ms and tostring(reclaim.first_slab_ms) or ''}
    end
  else
    -- Still named, so its record must outlive the naming, or it would be counted anew.
    redis.call('PEXPIRE', reclaim_key, CONST.ended_retention_ms)
    redis.call('ZADD', KEY.ended_reclaims, integer(now_us), reclaim_id)
  end
end
local orders = {}
for _, reclaim_id in ipairs(redis.call('ZRANGE', KEY.producer_reclaims .. producer_id, 0, -1)) do
  if not running[reclaim_id] then
    local field = redis.call('HMGET', KEY.reclaim .. reclaim_id,
      'taken_up', 'requested_bytes', 'deadline_s')
    if field[1] == '1' then
      close_reclaim(reclaim_id, producer_id, 'dropped')
      reclaimed[#reclaimed + 1] = {'dropped', '', ''}
    elseif whole(field[2]) and is_decimal(field[3]) then
      orders[#orders + 1] = {reclaim_id, tonumber(field[2]), field[3]}
    else
      drop_reclaim(reclaim_id, producer_id)
    end
  end
end

return {'ok', books_id, min_epoch, grantable and 1 or 0, ended, orders, attached_us, reclaimed}
