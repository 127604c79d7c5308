-- Answers. A script answers {'ok', ...}, {'refused', code, message, name, value, ...} or {'no_books'}.
-- A refusal comes before the first write: nothing has changed.

local function refuse(code, message, ...)
  return {'refused', code, message, ...}
end

-- Lua's own tostring() keeps 14 digits; epochs and microseconds have 16.
local function integer(number)
  return string.format('%d', number)
end
