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
  return text and #text <= CONST.max_name_length and string.find(text, '^%w[%w._:-]*$')
    and string.find(text, '%w$') and true or false
end
