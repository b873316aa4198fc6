#pragma once

#include <string>
#include <vector>

#include "app/import/import_rows.h"

namespace tessera::app {

/// The kinds of files, each with its rows: DeepSpeed's JSON, Accelerate's YAML, and `fsdp_config` of transformers.
const std::vector<ImportFormat>& import_formats();

ImportFormat deepspeed_format();
ImportFormat accelerate_format();
ImportFormat fsdp_format();

/// Parts of DeepSpeed's table.
std::vector<ImportRow> deepspeed_zero_rows();
std::vector<ImportRow> deepspeed_offload_rows();
std::vector<ImportRow> deepspeed_precision_rows();
std::vector<ImportRow> deepspeed_optimizer_rows();
std::vector<ImportRow> deepspeed_scheduler_rows();
/// Where DeepSpeed's defaults are not Tessera's; for Accelerate's inline settings too.
void finish_deepspeed_zero(ImportSession& session);
void finish_deepspeed_precision(ImportSession& session);
void finish_deepspeed_optimizer(ImportSession& session);
void finish_deepspeed_scheduler(ImportSession& session);
void finish_deepspeed_clipping(ImportSession& session);
/// Whether Accelerate or the file itself trains with fp16, or bf16, as DeepSpeed does.
bool deepspeed_trains_in(const ImportSession& session, const std::string& dtype);

/// What the scheduler says the peak of the learning rate is, in place of the optimizer's; null: nothing.
nlohmann::json deepspeed_scheduler_peak(const ImportSession& session);

/// Rows of `fsdp.*`, for Accelerate too.
std::vector<ImportRow> fsdp_rows();
void finish_fsdp(ImportSession& session);
/// "fsdp_sharding_strategy" and "sharding_strategy" are both "fsdp.sharding_strategy".
std::string fsdp_row_name(const std::string& key);

/// Why offload to the host's memory is for people to say, and how.
extern const char kHostTierByHand[];
/// What says how gathered units are found, where the file does not.
extern const char kUnitsNote[];

}  // namespace tessera::app
