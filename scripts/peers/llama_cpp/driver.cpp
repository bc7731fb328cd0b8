// Decode prompts of token ids greedily with llama.cpp, plainly or with its own speculation, and time it.
//
//   driver -m TARGET.gguf -t 2 -c 4096 [-md DRAFTER.gguf --spec-type draft-eagle3 --spec-draft-n-max 3]
//
// The options are llama.cpp's own. Like scripts/peers/worker.py it answers JSON lines, first with its description:
//
//   {"answer": {"version": "0.5.0-dev", "computes": "CPU : AVX2 = 1", "threads": 2}}
//   {"do": "decode", "prompts": [[1, 2]], "num_tokens": 128, "stop_token_ids": [2]}
//   {"answer": {"prefill_s": 0.1, "decode_s": 0.5, "passes": 40, "token_ids": [[3, 4]]}}
//
// Prompts are decoded one after the other, from an empty cache. A prompt's own pass gives the first token, as in
// llama.cpp's server; `decode_s` and `passes` count what follows. Seconds and counts are sums over the prompts.

#include "arg.h"
#include "common.h"
#include "llama-ext.h"
#include "llama.h"
#include "speculative.h"

#include <nlohmann/json.hpp>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

using json = nlohmann::ordered_json;

static void expect(bool holds, const char * what) {
    if (!holds) throw std::runtime_error(what);
}

class Decoder {
public:
    explicit Decoder(common_params params) : params_(std::move(params)) {
        auto & speculation = params_.speculative;
        const auto outputs = common_speculative_get_output_limits(params_.n_batch, 1, common_speculative_n_max(&speculation));
        params_.n_outputs_max = outputs.total;
        params_.n_outputs_max_per_seq = outputs.per_seq;
        loaded_ = common_init_from_params(params_);
        target_ = loaded_->context();
        expect(target_, "llama.cpp cannot load the target");
        vocab_size_ = llama_vocab_n_tokens(llama_model_get_vocab(loaded_->model()));
        batch_ = common_batch(target_);
        if (speculation.has_dft()) {
            auto of_drafter = common_base_params_to_speculative(params_);
            loaded_drafter_ = common_speculative_init_from_params(of_drafter, loaded_->model(), target_);
            drafter_ = loaded_drafter_->context();
            expect(drafter_, "llama.cpp cannot load the drafter");
            speculation.draft.ctx_tgt = target_;
            speculation.draft.ctx_dft = drafter_;
        }
        speculative_.reset(common_speculative_init(speculation, 1));
        expect(speculative_ || !drafter_, "llama.cpp cannot speculate with this drafter");
        const auto & types = speculation.types;
        if (std::count(types.begin(), types.end(), COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH)) {
            // it may read the last layer, which else computes the rows with logits only: of a prompt, the last one
            llama_set_embeddings_nextn(target_, true, /*masked*/ false);
        }
    }

    json describe() const {
        return {{"version", llama_version()}, {"computes", llama_print_system_info()}, {"threads", llama_n_threads(target_)}};
    }

    json decode(const json & request) {
        const auto prompts = request.at("prompts").get<std::vector<llama_tokens>>();
        num_tokens_ = request.at("num_tokens");
        stops_ = request.at("stop_token_ids").get<llama_tokens>();
        passes_ = 0;
        int64_t prefill_us = 0, decode_us = 0;
        std::vector<llama_tokens> answers;
        for (const auto & prompt : prompts) {
            const int64_t started = ggml_time_us();
            begin(prompt);
            const int64_t first = ggml_time_us();
            while (!ended_) step();
            prefill_us += first - started;
            decode_us += ggml_time_us() - first;
            answers.push_back(answer_);
        }
        return {{"prefill_s", prefill_us / 1e6}, {"decode_s", decode_us / 1e6}, {"passes", passes_}, {"token_ids", answers}};
    }

private:
    // Fill the caches with a prompt, and emit the first token.
    void begin(const llama_tokens & prompt) {
        for (auto * context : {target_, drafter_}) {
            if (context) llama_memory_clear(llama_get_memory(context), true);
        }
        batch_.clear();
        for (size_t i = 0; i < prompt.size(); i++) batch_.add(prompt[i], i, 0, i + 1 == prompt.size());
        run();
        known_ = prompt;
        common_speculative_begin(speculative_.get(), 0, known_);
        answer_.clear();
        ended_ = false;
        emit(likeliest(prompt.size() - 1));
    }

    // Draft, verify in one pass, and emit the drafts that the target chooses, too, and a token of its own.
    void step() {
        const llama_token pending = answer_.back();
        const llama_pos length = known_.size();
        const auto drafts = propose(pending, length);
        batch_.clear();
        batch_.add(pending, length, 0, true);
        for (size_t i = 0; i < drafts.size(); i++) batch_.add(drafts[i], length + 1 + i, 0, true);
        run();
        passes_++;
        size_t accepted = 0;
        while (accepted < drafts.size() && likeliest(accepted) == drafts[accepted]) accepted++;
        if (!drafts.empty()) common_speculative_accept(speculative_.get(), 0, accepted);
        known_.push_back(pending);
        known_.insert(known_.end(), drafts.begin(), drafts.begin() + accepted);
        for (size_t i = 0; i <= accepted && !ended_; i++) emit(i < accepted ? drafts[i] : likeliest(i));
        forget(target_);
        forget(drafter_);
    }

    // Draft as many tokens as llama.cpp's options say, but none beyond the answer.
    llama_tokens propose(llama_token pending, llama_pos length) {
        llama_tokens drafts;
        const int room = num_tokens_ - answer_.size() - 1;
        if (!speculative_ || room == 0) return drafts;
        common_speculative_get_draft_params(speculative_.get(), 0) = {true, room, length, pending, &known_, &drafts};
        common_speculative_draft(speculative_.get());
        if ((int) drafts.size() > room) drafts.resize(room);
        forget(drafter_);  // the rows that drafted: the verified pass writes them again
        return drafts;
    }

    // Run the batch through the target, then through the drafter.
    void run() {
        expect(llama_process(target_, LLAMA_PROCESS_TYPE_DECODE, batch_.get()) == 0, "llama.cpp cannot run a pass");
        expect(common_speculative_process(speculative_.get(), batch_), "llama.cpp's drafter cannot run a pass");
    }

    // Cut a cache to the known tokens.
    void forget(llama_context * context) {
        if (context) llama_memory_seq_rm(llama_get_memory(context), 0, known_.size(), -1);
    }

    llama_token likeliest(int row) {
        const float * logits = llama_get_logits_ith(target_, row);
        return std::max_element(logits, logits + vocab_size_) - logits;
    }

    void emit(llama_token token) {
        answer_.push_back(token);
        ended_ = (int) answer_.size() >= num_tokens_ || std::count(stops_.begin(), stops_.end(), token) > 0;
    }

    common_params params_;
    common_init_result_ptr loaded_;
    common_speculative_init_result_ptr loaded_drafter_;
    common_speculative_ptr speculative_;  // freed before the contexts that it uses
    llama_context * target_ = nullptr;
    llama_context * drafter_ = nullptr;
    common_batch batch_;
    int vocab_size_ = 0;

    int num_tokens_ = 0, passes_ = 0;
    llama_tokens stops_;
    llama_tokens known_;   // the tokens in the target's cache
    llama_tokens answer_;  // its last token is in no cache
    bool ended_ = false;
};

int main(int argc, char ** argv) {
    std::FILE * answers = fdopen(dup(1), "w");
    dup2(2, 1);  // what llama.cpp prints goes to standard error
    const auto say = [&](const json & line) {
        std::fprintf(answers, "%s\n", line.dump().c_str());
        std::fflush(answers);
    };
    try {
        common_params params;
        common_init();
        expect(common_params_parse(argc, argv, params, LLAMA_EXAMPLE_SPECULATIVE), "llama.cpp has no such options");
        llama_backend_init();
        Decoder decoder(params);
        say({{"answer", decoder.describe()}});
        for (std::string line; std::getline(std::cin, line);) say({{"answer", decoder.decode(json::parse(line))}});
    } catch (const std::exception & error) {
        say({{"error", error.what()}});
        return 1;
    }
    return 0;
}
