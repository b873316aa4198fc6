#include "runtime/base/bytes.h"
#include "runtime/base/text_table.h"
#include "workshop/bench/number_text.h"
#include "workshop/bench/studies/bucket_study.h"

namespace tessera::app {
namespace {

using Align = TextTable::Align;

std::string milliseconds(double seconds) { return number_text(seconds * 1e3, "%.2f"); }
std::string microseconds(double seconds) { return number_text(seconds * 1e6, "%.1f"); }
std::string times(double ratio) { return number_text(ratio, "%.2f") + "x"; }

std::int64_t bytes_of(double mib) { return static_cast<std::int64_t>(mib * (1 << 20)); }
std::string label_of(const BucketTiming& timing) {
  return timing.cap_mb == 0 ? "per tensor" : number_text(timing.cap_mb, "%g MiB");
}

std::vector<const BucketTiming*> all_of(const BucketModelReport& model) {
  std::vector<const BucketTiming*> timings = {&model.per_tensor};
  for (const BucketTiming& timing : model.sweep) timings.push_back(&timing);
  return timings;
}

double fitted_s(const BucketModelReport& model, const BucketTiming& timing) {
  return model.fit.seconds_of(timing.collectives, model.gradient_bytes());
}

std::string table_of(const BucketModelReport& model) {
  TextTable table({left_column("bucket"), right_column("collectives"), right_column("p50 ms"), right_column("p95 ms"),
                   right_column("p99 ms"), right_column("communication ms"), right_column("by the fit ms"),
                   right_column("step gain"), right_column("communication gain")});
  for (const BucketTiming* timing : all_of(model)) {
    table.add_row({label_of(*timing), std::to_string(timing->collectives), milliseconds(timing->step.median_s()),
                   milliseconds(timing->step.quantile_s(0.95)), milliseconds(timing->step.quantile_s(0.99)),
                   milliseconds(timing->communication.median_s()), milliseconds(fitted_s(model, *timing)),
                   times(model.step_gain(*timing)), times(model.communication_gain(*timing))});
  }
  return table.to_string();
}

std::string judged(double gain) {
  return times(gain) + " (goal " + times(kBucketGoal) + (gain >= kBucketGoal ? ": reached)" : ": not reached)");
}

/// Returns a text that says which bucket size is fastest, and by how much.
std::string verdict_of(const BucketModelReport& model) {
  const BucketTiming& best = model.best();
  return "the best bucket is " + label_of(best) + ": over one parameter a bucket, a step is " +
         judged(model.step_gain(best)) + ", its communication alone " + judged(model.communication_gain(best)) + "\n";
}

/// Returns a text that says why the best bucket is fastest. The fit gives the time that fewer starts of reductions
/// save. The measurement gives the communication time that the best bucket saves.
std::string reason_of(const BucketModelReport& model) {
  const BucketTiming &tensors = model.per_tensor, &best = model.best();
  const AlphaBeta& fit = model.fit;
  const double starts = static_cast<double>(tensors.collectives - best.collectives) * fit.alpha_s;
  const double saved = tensors.communication.median_s() - best.communication.median_s();
  const double share = tensors.communication.median_s() / tensors.step.median_s();
  return "a reduction of b bytes takes alpha + beta b, alpha = " + microseconds(fit.alpha_s) +
         " us, 1/beta = " + number_text(1e-9 / fit.beta_s_per_byte, "%.2f") + " GB/s; " +
         std::to_string(tensors.collectives - best.collectives) + " fewer starts are " + milliseconds(starts) +
         " ms by the fit, " + milliseconds(saved) + " ms of communication by measurement; communication is " +
         number_text(100 * share, "%.0f") + " % of a step with one parameter a bucket\n";
}

std::string points_of(const BucketModelReport& model) {
  TextTable table({{"single reduction"}, {"p50 us", Align::kRight}, {"fit us", Align::kRight}});
  for (const ReductionTiming& reduction : model.reductions) {
    table.add_row({format_bytes(reduction.bytes), microseconds(reduction.call.median_s()),
                   microseconds(model.fit.seconds_of(1, reduction.bytes))});
  }
  return table.to_string();
}

std::string inference_of(const BucketModelReport& model) {
  const InferenceTiming& inference = model.inference;
  return "loss in training " + number_text(model.first_loss, "%.3f") + " -> " + number_text(model.last_loss, "%.3f") +
         "; on held-out data " + number_text(inference.loss, "%.3f") + ", " +
         number_text(100 * inference.accuracy, "%.1f") + " % right; forward of a batch p50 " +
         milliseconds(inference.batch.median_s()) + " ms, p95 " + milliseconds(inference.batch.quantile_s(0.95)) +
         ", p99 " + milliseconds(inference.batch.quantile_s(0.99)) + "\n";
}

nlohmann::json seconds_of(const Samples& samples) {
  nlohmann::json seconds = nlohmann::json::array();
  for (const std::int64_t ns : samples.ns) seconds.push_back(static_cast<double>(ns) * 1e-9);
  return seconds;
}

nlohmann::json json_of(const BucketModelReport& model) {
  nlohmann::json sweep = nlohmann::json::array(), reductions = nlohmann::json::array();
  for (const BucketTiming& timing : model.sweep) {
    sweep.push_back({{"bucket_bytes", bytes_of(timing.cap_mb)},
                     {"collectives", timing.collectives},
                     {"samples_s", seconds_of(timing.step)},
                     {"communication_s", seconds_of(timing.communication)}});
  }
  for (const ReductionTiming& reduction : model.reductions) {
    reductions.push_back({{"bytes", reduction.bytes}, {"samples_s", seconds_of(reduction.call)}});
  }
  return {{"model", model.name},
          {"data", model.data},
          {"parameters", model.parameters},
          {"gradient_bytes", model.gradient_bytes()},
          {"steps_a_round", model.steps_a_round},
          {"first_loss", model.first_loss},
          {"last_loss", model.last_loss},
          {"per_tensor_collectives", model.per_tensor.collectives},
          {"per_tensor_samples_s", seconds_of(model.per_tensor.step)},
          {"per_tensor_communication_s", seconds_of(model.per_tensor.communication)},
          {"sweep", sweep},
          {"reductions", reductions},
          {"inference",
           {{"loss", model.inference.loss},
            {"accuracy", model.inference.accuracy},
            {"samples_s", seconds_of(model.inference.batch)}}}};
}

}  // namespace

std::string to_text(const BucketReport& report) {
  std::string text = report.transport + ", " + std::to_string(report.ranks) + " ranks\n";
  for (const BucketModelReport& model : report.models) {
    text += "\n" + model.name + ": " + std::to_string(model.parameters) + " parameters in " +
            std::to_string(model.tensors) + " tensors, " + format_bytes(model.gradient_bytes()) + " of gradients; " +
            model.data + "\n" + table_of(model) + verdict_of(model) + reason_of(model) + points_of(model) +
            inference_of(model);
  }
  return text;
}

std::string to_csv(const BucketReport& report) {
  std::string text =
      "model,bucket_mib,collectives,samples,p50_s,p95_s,p99_s,communication_p50_s,fit_communication_s,step_gain,"
      "communication_gain\n";
  for (const BucketModelReport& model : report.models) {
    for (const BucketTiming* timing : all_of(model)) {
      text += model.name + "," + number_text(timing->cap_mb, "%g") + "," + std::to_string(timing->collectives) + "," +
              std::to_string(timing->step.ns.size());
      for (const double value : {timing->step.median_s(), timing->step.quantile_s(0.95), timing->step.quantile_s(0.99),
                                 timing->communication.median_s(), fitted_s(model, *timing), model.step_gain(*timing),
                                 model.communication_gain(*timing)}) {
        text += "," + number_text(value, "%.9g");
      }
      text += "\n";
    }
  }
  return text;
}

nlohmann::json to_json(const BucketReport& report) {
  nlohmann::json models = nlohmann::json::array();
  for (const BucketModelReport& model : report.models) models.push_back(json_of(model));
  return {{"transport", report.transport}, {"ranks", report.ranks}, {"models", models}};
}

}  // namespace tessera::app
