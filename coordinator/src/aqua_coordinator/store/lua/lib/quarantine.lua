-- What cannot be right is set aside, so that a bad record stops no step: it leaves the books with
-- its reason, is counted and listed, and the step goes on as if that record had been lost. Members
-- repeat their full state, so the books heal by themselves.
--
-- `redis.call` is ours from here on: a key of the wrong type, or a stream that takes no more, is
-- set aside as a whole, and the command is repeated on the empty key. A script that only reads sets
-- nothing aside, but passes over what is bad; `audit_books` comes by in the sweep.

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
    redis.call('XADD', KEY.quarantine, 'MAXLEN', '~', CONST.max_quarantined, '*', 'key', key,
      'reason', reason, 'record', string.sub(record or '', 1, CONST.max_quarantined_bytes))
    -- The count may itself be junk.
    server().pcall('HINCRBY', KEY.books, 'quarantined', 1)
  end
end

function redis.call(...)
  local answer = server().pcall(...)
  if type(answer) == 'table' and answer.err then
    if reading or not (string.find(answer.err, '^WRONGTYPE')
        or string.find(answer.err, 'stream has exhausted')) then
      error(answer, 0)
    end
    local key = select(2, ...)
    local kind = server().call('TYPE', key).ok
    server().call('DEL', key)
    set_aside(key, 'was a ' .. kind .. ' that takes no such command')
    answer = server().call(...)
  end
  return answer
end
