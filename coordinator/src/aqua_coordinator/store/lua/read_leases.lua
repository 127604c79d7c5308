-- A page of the booked leases, by producer and then in the order of their grants; or one lease,
-- booked or ended.
--
-- KEYS[1]  the books
-- ARGV[1]  go on with this producer, '' from the start
-- ARGV[2]  and after this epoch
-- ARGV[3]  how many at most
-- ARGV[4]  only this one, or ''
-- ARGV[5]  only in this state, or ''
-- ARGV[6]  only of this producer, or ''
-- ARGV[7]  only of this consumer, or ''
-- Result   {'ok', producer_id, epoch, rows}: where to go on, '' at the end; see lease_row
--
-- A filter may leave a page short, or empty, with more to come: the scan is bounded, not the page.
-- @flags no-writes

local rows, limit, scanned = {}, tonumber(ARGV[3]), 0
if ARGV[4] ~= '' then
  local lease = lease_of(ARGV[4])
  return {'ok', '', '', lease and {lease_row(lease)} or {}}
end

local function wanted(lease)
  return (ARGV[5] == '' or lease.state == ARGV[5])
    and (ARGV[7] == '' or lease.consumer_id == ARGV[7])
end

local producer_id, after = ARGV[1], '(' .. ARGV[2]
if producer_id == '' then
  producer_id = ARGV[6] ~= '' and ARGV[6]
    or redis.call('ZRANGEBYLEX', KEY.producers, '-', '+', 'LIMIT', 0, 1)[1]
  after = '-inf'
end
while producer_id do
  local names = redis.call('ZRANGEBYSCORE', KEY.producer_leases .. producer_id, after, '+inf',
    'WITHSCORES', 'LIMIT', 0, CONST.max_scan - scanned)
  for index = 1, #names, 2 do
    local lease = lease_of(names[index])
    if wanted(lease) then
      rows[#rows + 1] = lease_row(lease)
    end
    scanned = scanned + 1
    if #rows == limit or scanned == CONST.max_scan then
      return {'ok', producer_id, names[index + 1], rows}
    end
  end
  scanned = scanned + 1
  if ARGV[6] ~= '' then
    break
  end
  if scanned >= CONST.max_scan then
    return {'ok', producer_id, '+inf', rows}
  end
  producer_id = redis.call('ZRANGEBYLEX', KEY.producers, '(' .. producer_id, '+', 'LIMIT', 0, 1)[1]
  after = '-inf'
end
return {'ok', '', '', rows}
