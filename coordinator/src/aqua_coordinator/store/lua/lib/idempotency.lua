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
  redis.call('SET', key, request .. '\n' .. answer, 'PX', CONST.idempotency_ttl_ms)
end
