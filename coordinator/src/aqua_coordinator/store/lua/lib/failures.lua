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
    if rest_us > 0 and rest_us <= CONST.max_failure_us then
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
      span_us = math.min(math.max(span_us, 2 * last_us), CONST.max_failure_us)
    elseif until_us + last_us > clock_us then
      entries[#entries + 1] = about .. ' ' .. until_us .. ' ' .. last_us
    end
  end
  if #entries >= CONST.max_failures then
    table.remove(entries, 1)
  end
  entries[#entries + 1] = subject .. ' ' .. integer(clock_us + span_us) .. ' ' .. integer(span_us)
  return table.concat(entries, ' ')
end

-- A consumer could not attach to a lease that it is about to release.
local function note_failure(lease, failure, voice)
  local offer = offer_of(lease.producer_id)
  local consumer = KEY.consumer .. lease.consumer_id
  local known = redis.call('HMGET', consumer, 'incarnation', 'avoided')
  if not offer.exists or not known[1] then
    return
  end
  local span_us = failure == 'unreachable' and CONST.unreachable_us or CONST.unusable_us
  redis.call('HSET', consumer, 'avoided',
    say(known[2], lease.producer_id .. '@' .. offer.incarnation, span_us))
  -- Of any other lease the producer has said that it was attached.
  if failure == 'unreachable' and (lease.state == STATE.granted or lease.reason == 'expired') then
    offer.unreachable = say(offer.unreachable, voice ~= '' and voice or lease.consumer_id, span_us)
    redis.call('HSET', KEY.producer .. lease.producer_id, 'unreachable', offer.unreachable)
  end
end
