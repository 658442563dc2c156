// main.cc - the command line: gpt train, gpt generate.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <thread>

#include "generate.h"
#include "train.h"

namespace {

void add_engine_options(CLI::App* app, gpt::Options* o) {
  app->add_option("--manifest", o->manifest, "TOML manifest of the run")->check(CLI::ExistingFile);
  app->add_option("--set", o->settings, "KEY=VALUE: override a manifest setting; may be repeated")
      ->allow_extra_args(false);
  app->add_option("--size", o->size, "base: 10.8 M params; tiny: 0.4 M, for tests")
      ->check(CLI::IsMember({"base", "tiny"}))
      ->capture_default_str();
  app->add_option("--dtype", o->dtype, "of the weights; default: bf16 when the manifest enables it")
      ->check(CLI::IsMember({"bf16", "fp32"}));
  app->add_option("--threads", o->threads, "threads of the matrix products; default: cores / ranks");
  app->add_option("--tag", o->tag, "which checkpoint to load; default: the latest");
  app->add_option("--seed", o->seed, "of initial weights and batches, or of generated text")->capture_default_str();
}

void add_train_options(CLI::App* app, gpt::Options* o) {
  add_engine_options(app, o);
  app->get_option("--manifest")->required();
  app->add_option("--text", o->text, "text file; its last 5 % are held out")->capture_default_str();
  app->add_option("--steps", o->steps, "steps of the whole run, resumed ones included")->capture_default_str();
  app->add_option("--warmup", o->warmup, "steps over which the learning rate rises")->capture_default_str();
  app->add_option("--lr", o->lr, "peak learning rate; default: the manifest's");
  app->add_option("--save", o->save, "directory for checkpoints; one is saved at the end");
  app->add_option("--save-every", o->save_every, "and every so many steps");
  app->add_option("--resume", o->resume, "directory of checkpoints to continue from");
  app->add_option("--export", o->export_path, "write all weights into one file at the end");
  app->add_option("--eval-every", o->eval_every, "evaluate every so many steps, beside at the end");
  app->add_option("--eval-samples", o->eval_samples, "held-out samples per evaluation")->check(CLI::PositiveNumber);
  app->add_flag("--eval", o->eval_only, "only evaluate (with --resume)");
  app->add_flag("--report-gather", o->report_gather, "print gathered bytes beside the formula");
}

// Text from a weight file, or from a sharded checkpoint (every rank loads it; rank 0 writes).
void run_generate(const gpt::Options& options, const std::string& weight_file, gpt::Sampling sampling) {
  gpt::Config config;
  gpt::Weights weights;
  bool writes = true;
  int ranks = 1;
  if (!weight_file.empty()) {
    weights = gpt::read_weight_file(weight_file, &config);
  } else {
    config = gpt::config_by_name(options.size);
    gpt::Engine engine = gpt::open_engine(options.manifest, options.settings);
    gpt::ShardedModel model(engine.get(), config, gpt::choose_dtype(engine.get(), options.dtype));
    gpt::check(strata_load(engine.get(), options.resume.c_str(), options.tag.empty() ? nullptr : options.tag.c_str()),
               "loading a checkpoint");
    weights = model.read_all();
    writes = strata_rank(engine.get()) == 0;
    ranks = strata_world(engine.get());
  }
  if (!writes) return;
  gpt::set_threads(options.threads > 0 ? options.threads
                                       : std::max(1, int(std::thread::hardware_concurrency()) / ranks));
  sampling.seed = options.seed;
  std::fputs(sampling.prompt.c_str(), stdout);
  gpt::generate(config, weights, sampling, [](char byte) {
    std::fputc(byte, stdout);
    std::fflush(stdout);
  });
  std::fputc('\n', stdout);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A small GPT on bytes, trained under Strata");
  app.require_subcommand(1);
  gpt::Options options;
  std::string weight_file;
  gpt::Sampling sampling{.prompt = "In the beginning", .bytes = 300, .temperature = 0.8, .seed = 1};

  CLI::App* train = app.add_subcommand("train", "train, evaluate, save and export");
  add_train_options(train, &options);
  CLI::App* generate = app.add_subcommand("generate", "write text from a weight file or a checkpoint");
  add_engine_options(generate, &options);
  CLI::Option* file = generate->add_option("--weights", weight_file, "weight file written by train --export");
  CLI::Option* checkpoint = generate->add_option("--checkpoint", options.resume, "directory of sharded checkpoints");
  checkpoint->excludes(file)->needs(generate->get_option("--manifest"));
  generate->add_option("--prompt", sampling.prompt, "text to continue")->capture_default_str();
  generate->add_option("--bytes", sampling.bytes, "how many bytes to write")->capture_default_str();
  generate->add_option("--temperature", sampling.temperature, "0: always the likeliest byte")->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  try {
    if (train->parsed()) {
      gpt::Trainer(options).run();
    } else if (file->count() + checkpoint->count() == 0) {
      throw std::runtime_error("generate needs --weights FILE or --checkpoint DIR");
    } else {
      run_generate(options, weight_file, sampling);
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "gpt: %s\n", e.what());
    return 1;
  }
  return 0;
}
