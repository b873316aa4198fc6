#pragma once

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

/// Makers of StrategyField, for the rows in keys/. `at` takes a `Strategy&` or `const Strategy&` and returns the
/// member.

/// A field whose JSON value has the C++ type Value.
template <ValueKind kind, typename Value, typename At>
StrategyField plain_field(At at) {
  return {kind,
          {},
          [at](Strategy& s, const nlohmann::json& value) { at(s) = value.get<Value>(); },
          [at](const Strategy& s) { return nlohmann::ordered_json(static_cast<Value>(at(s))); },
          {},
          {}};
}

template <typename At>
StrategyField integer_field(At at) {
  return plain_field<ValueKind::kInteger, std::int64_t>(at);
}

template <typename At>
StrategyField bytes_field(At at) {
  return plain_field<ValueKind::kBytes, std::int64_t>(at);
}

template <typename At>
StrategyField number_field(At at) {
  return plain_field<ValueKind::kNumber, double>(at);
}

/// A `std::optional<Value>`; null stands for empty.
template <ValueKind kKind, typename Value, typename At>
StrategyField optional_field(At at) {
  return {kKind,
          {},
          [at](Strategy& s, const nlohmann::json& value) {
            at(s) = value.is_null() ? std::nullopt : std::optional(value.get<Value>());
          },
          [at](const Strategy& s) { return at(s) ? nlohmann::ordered_json(*at(s)) : nlohmann::ordered_json(nullptr); },
          {},
          {}};
}

template <typename At>
StrategyField optional_integer_field(At at) {
  return optional_field<ValueKind::kOptionalInteger, std::int64_t>(at);
}

template <typename At>
StrategyField optional_number_field(At at) {
  return optional_field<ValueKind::kOptionalNumber, double>(at);
}

/// A `std::optional<CutAxes>`; null stands for empty.
template <typename At>
StrategyField axes_field(At at) {
  return {ValueKind::kOptionalAxes,
          {},
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
          },
          {},
          {}};
}

template <typename At>
StrategyField boolean_field(At at) {
  return plain_field<ValueKind::kBoolean, bool>(at);
}

template <typename At>
StrategyField names_field(At at) {
  return plain_field<ValueKind::kNames, std::vector<std::string>>(at);
}

/// A list of two numbers, which go to two members.
template <typename First, typename Second>
StrategyField number_pair_field(First first, Second second) {
  return {ValueKind::kNumberPair,
          {},
          [=](Strategy& s, const nlohmann::json& value) {
            first(s) = value.at(0).get<double>();
            second(s) = value.at(1).get<double>();
          },
          [=](const Strategy& s) {
            return nlohmann::ordered_json::array({static_cast<double>(first(s)), static_cast<double>(second(s))});
          },
          {},
          {}};
}

/// A field that holds one of the enumerators in `names`, which must live for ever.
template <typename At, typename Enum>
StrategyField choice_field(At at, const std::vector<Named<Enum>>& names) {
  StrategyField field;
  field.kind = ValueKind::kChoice;
  for (const Named<Enum>& entry : names) field.choices.push_back({entry.name, entry.doc});
  field.set = [at, &names](Strategy& s, const nlohmann::json& value) {
    for (const Named<Enum>& entry : names) {
      if (entry.name == value.get_ref<const std::string&>()) at(s) = entry.value;
    }
  };
  field.get = [at, &names](const Strategy& s) {
    nlohmann::ordered_json value;  // stays null if the struct holds something that has no name
    for (const Named<Enum>& entry : names) {
      if (entry.value == at(s)) value = entry.name;
    }
    return value;
  };
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

/// A std::variant as an object with a "type". The compiler refuses rows that are not those of its alternatives, in
/// their order.
template <typename At, typename... T>
StrategyField variant_field(At at, const TypeRow<T>&... rows) {
  static_assert(std::is_same_v<std::remove_reference_t<decltype(at(std::declval<Strategy&>()))>, std::variant<T...>>,
                "each alternative of the variant has its row, in the order of the alternatives");
  StrategyField field;
  field.kind = ValueKind::kVariant;
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
