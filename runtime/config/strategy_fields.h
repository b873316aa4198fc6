#pragma once

// See docs/glossary.md: unit.

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "runtime/config/strategy_names.h"
#include "runtime/config/strategy_table.h"

namespace tessera {

/// A member of Strategy. `AT(optimizer.lr)` finds this member in a Strategy and in a const Strategy, and has the
/// member's path.
template <typename Find>
struct MemberAt {
  const char* path;  ///< "optimizer.lr"
  Find find;
  template <typename AnyStrategy>
  auto& operator()(AnyStrategy& strategy) const {
    return find(strategy);
  }
};
template <typename Find>
MemberAt<Find> member_at(const char* path, Find find) {
  return {path, std::move(find)};
}
#define AT(member) \
  member_at(       \
      #member, [](auto& strategy) -> auto& { return strategy.member; })

/// Returns the pointer of the key that has the member's path, "/optimizer/lr". It is empty for an `at` without a path.
template <typename At>
std::string pointer_of(const At& at) {
  std::string pointer;
  if constexpr (requires { at.path; }) {
    pointer = std::string("/") + at.path;
    std::replace(pointer.begin(), pointer.end(), '.', '/');
  }
  return pointer;
}

/// These functions make a Condition. with_value makes a condition that holds where a member has the value `value`. The
/// file spells this value as `word`.
template <typename At, typename Value>
Condition with_value(At at, const std::string& word, Value value) {
  return {at.path + (" " + word), {pointer_of(at)}, [at, value](const Strategy& s) { return at(s) == value; }};
}
/// Makes a condition that holds where a number is above 0.
template <typename At>
Condition when_above_0(At at) {
  return {std::string(at.path) + " above 0", {pointer_of(at)}, [at](const Strategy& s) { return at(s) > 0; }};
}

/// The functions from here on make a StrategyField, for the rows in keys/. `at` takes a `Strategy&` or `const
/// Strategy&` and returns the member. `range` and `unit` are those of the row (StrategyKey).
template <typename At, typename Set, typename Get>
StrategyField made_field(ValueKind kind, const At& at, Set set, Get get) {
  StrategyField field;
  field.kind = kind;
  field.set = std::move(set);
  field.get = std::move(get);
  field.pointer = pointer_of(at);
  return field;
}

/// A field whose JSON value has the C++ type Value.
template <ValueKind kKind, typename Value, typename At>
StrategyField plain_field(At at, const Range& range = {}, const std::string& unit = {}) {
  StrategyField field = made_field(
      kKind, at, [at](Strategy& s, const nlohmann::json& value) { at(s) = value.get<Value>(); },
      [at](const Strategy& s) { return nlohmann::ordered_json(static_cast<Value>(at(s))); });
  field.range = range;
  field.unit = unit;
  return field;
}

template <typename At>
StrategyField integer_field(At at, const Range& range = {}, const std::string& unit = {}) {
  return plain_field<ValueKind::kInteger, std::int64_t>(at, range, unit);
}

template <typename At>
StrategyField bytes_field(At at, const Range& range) {
  return plain_field<ValueKind::kBytes, std::int64_t>(at, range, "bytes");
}

template <typename At>
StrategyField number_field(At at, const Range& range = {}, const std::string& unit = {}) {
  return plain_field<ValueKind::kNumber, double>(at, range, unit);
}

/// Makes a field for a `std::optional<Value>`. JSON's null stands for an empty optional.
template <ValueKind kKind, typename Value, typename At>
StrategyField optional_field(At at, const Range& range, const std::string& unit) {
  StrategyField field = made_field(
      kKind, at,
      [at](Strategy& s, const nlohmann::json& value) {
        at(s) = value.is_null() ? std::nullopt : std::optional(value.get<Value>());
      },
      [at](const Strategy& s) { return at(s) ? nlohmann::ordered_json(*at(s)) : nlohmann::ordered_json(nullptr); });
  field.range = range;
  field.unit = unit;
  return field;
}

template <typename At>
StrategyField optional_integer_field(At at, const Range& range, const std::string& unit) {
  return optional_field<ValueKind::kOptionalInteger, std::int64_t>(at, range, unit);
}

template <typename At>
StrategyField optional_number_field(At at, const Range& range, const std::string& unit) {
  return optional_field<ValueKind::kOptionalNumber, double>(at, range, unit);
}

/// Makes a field for a `std::optional<CutAxes>`. JSON's null stands for an empty optional.
template <typename At>
StrategyField axes_field(At at) {
  return made_field(
      ValueKind::kOptionalAxes, at,
      [at](Strategy& s, const nlohmann::json& value) {
        const auto has = [&](const char* axis) {
          return std::find(value.begin(), value.end(), nlohmann::json(axis)) != value.end();
        };
        at(s) = value.is_null() ? std::nullopt : std::optional(CutAxes{has(kHostAxis), has(kRankAxis)});
      },
      [at](const Strategy& s) {
        if (!at(s)) return nlohmann::ordered_json(nullptr);
        nlohmann::ordered_json axes = nlohmann::ordered_json::array();
        if (at(s)->host) axes.push_back(kHostAxis);
        if (at(s)->rank) axes.push_back(kRankAxis);
        return axes;
      });
}

template <typename At>
StrategyField boolean_field(At at) {
  return plain_field<ValueKind::kBoolean, bool>(at);
}

template <typename At>
StrategyField name_field(At at) {
  return plain_field<ValueKind::kName, std::string>(at);
}

template <typename At>
StrategyField names_field(At at) {
  return plain_field<ValueKind::kNames, std::vector<std::string>>(at);
}

/// A list of two numbers, which are stored in two members.
template <typename First, typename Second>
StrategyField number_pair_field(First first, Second second) {
  return made_field(
      ValueKind::kNumberPair, first,
      [=](Strategy& s, const nlohmann::json& value) {
        first(s) = value.at(0).get<double>();
        second(s) = value.at(1).get<double>();
      },
      [=](const Strategy& s) {
        return nlohmann::ordered_json::array({static_cast<double>(first(s)), static_cast<double>(second(s))});
      });
}

/// Makes a field that holds one of the enumerators in `names`. `names` must live until the program ends.
template <typename At, typename Enum>
StrategyField choice_field(At at, const std::vector<Named<Enum>>& names) {
  StrategyField field = made_field(
      ValueKind::kChoice, at,
      [at, &names](Strategy& s, const nlohmann::json& value) {
        for (const Named<Enum>& entry : names) {
          if (entry.name == value.get_ref<const std::string&>()) at(s) = entry.value;
        }
      },
      [at, &names](const Strategy& s) {
        nlohmann::ordered_json value;  // stays null if the struct's value is not one of `names`
        for (const Named<Enum>& entry : names) {
          if (entry.value == at(s)) value = entry.name;
        }
        return value;
      });
  for (const Named<Enum>& entry : names) field.choices.push_back({entry.name, entry.doc});
  return field;
}

/// The row of one alternative of a variant: a VariantType, without the parts that its C++ type gives.
template <typename T>
struct TypeRow {
  std::string name;
  std::string doc;
  std::string cost;
  std::vector<StrategyKey> members = {};
};

/// Makes a field for a std::variant, which the file has as an object with a "type". The compiler refuses the rows
/// unless they are those of the variant's alternatives, in the same order.
template <typename At, typename... T>
StrategyField variant_field(At at, const TypeRow<T>&... rows) {
  static_assert(std::is_same_v<std::remove_reference_t<decltype(at(std::declval<Strategy&>()))>, std::variant<T...>>,
                "each alternative of the variant has its row, in the order of the alternatives");
  StrategyField field;
  field.kind = ValueKind::kVariant;
  field.pointer = pointer_of(at);
  (field.types.push_back({rows.name, rows.doc, rows.cost, rows.members, [at](Strategy& s) { at(s) = T{}; }}), ...);
  field.set = [types = field.types](Strategy& s, const nlohmann::json& value) {
    for (const VariantType& type : types) {
      if (type.name != value.at(kTypeKey).get_ref<const std::string&>()) continue;
      type.choose(s);
      for (const StrategyKey& member : type.members) {
        if (const auto given = value.find(member.name()); given != value.end()) member.field.set(s, *given);
      }
    }
  };
  field.get = [types = field.types, at](const Strategy& s) {
    const VariantType& type = types[at(s).index()];
    nlohmann::ordered_json value = {{kTypeKey, type.name}};
    for (const StrategyKey& member : type.members) value[member.name()] = member.field.get(s);
    return value;
  };
  return field;
}

}  // namespace tessera
