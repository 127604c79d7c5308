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
    'domain', 'slab_bytes', 'avoided', 'tenant')
  local revision = whole(field[2])
  if field[1] and not (is_name(field[1]) and revision and is_name(field[5])) then
    set_aside(key, 'is no member', field[1])
    redis.call('DEL', key)
    field = {}
  end
  return {
    incarnation = field[1], revision = revision, fingerprint = field[3],
    retired = field[4] or '', domain = field[5], slab_bytes = whole(field[6]),
    avoided = field[7], tenant = field[8] or '',
  }
end

-- The lives that this member has left behind, latest first, a bounded number of them.
local function retire(known)
  local names = {known.incarnation}
  for name in string.gmatch(known.retired, '%S+') do
    if #names < CONST.max_retired_incarnations then
      names[#names + 1] = name
    end
  end
  return table.concat(names, ' ')
end

-- Whether a member's field can be shown under this name.
local function is_readable(name, text)
  if name == 'memory_total_bytes' and (text or '') == '' then
    return true  -- Not told, or booked by a version that did not keep it.
  elseif string.find(name, '_bytes$') then
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
-- start), limit, '' or the name of the only one, and whose members. A short page is the last.
local function member_rows(argv, index, of_tenant, seen, prefix, ...)
  local as_tenant = argv[4] or ''
  if argv[3] ~= '' then
    local is_shown = as_tenant == ''
      or redis.call('HGET', prefix .. argv[3], 'tenant') == as_tenant
    return {is_shown and member_row(argv[3], seen, prefix, ...) or nil}
  elseif as_tenant ~= '' then
    index = of_tenant .. as_tenant
  end
  local rows, cursor, limit = {}, argv[1] == '' and '-' or '(' .. argv[1], tonumber(argv[2])
  repeat
    local names = redis.call('ZRANGEBYLEX', index, cursor, '+', 'LIMIT', 0, limit - #rows)
    for _, name in ipairs(names) do
      rows[#rows + 1] = member_row(name, seen, prefix, ...)
      cursor = '(' .. name
    end
  until #names == 0 or #rows == limit
  return rows
end
