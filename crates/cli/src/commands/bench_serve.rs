//! `glimmer bench serve`: a load test of one server.

use std::{
    fs::OpenOptions,
    io::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, bail};
use glimmer_bench::serve::{
    arrival::{Ramp, Traffic},
    client::{Address, Client},
    dataset::{CustomOptions, RandomShape, RepetitionShape},
    epochs::{quality, repeat},
    exchange::{Api, Ask, Outcome},
    load::{Load, Target},
    report::{Report, Settings, prompts_hash},
    server::{first_model, token_count, version},
    summary::{Goodput, Metric},
    table::table,
    workload::Workload,
};
use glimmer_text::{ChatFormat, ChatTemplate, Tokenizer};
use hyper::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use serde_json::{Map, Value, json};

use crate::{
    load_args::{Backend, BenchServeArgs, DatasetArgs, DatasetName, OutputArgs, RequestArgs, ServerArgs, TrafficArgs},
    open,
    output::OutputFile,
    progress,
};

/// Exit codes: 0 when at least one request was answered, 1 when none was.
pub(crate) fn run(args: &BenchServeArgs) -> anyhow::Result<ExitCode> {
    let runtime = runtime()?;
    let address = match &args.server.base_url {
        Some(url) => Address::parse("--base-url", url)?,
        None => Address::of(&args.host, args.port)?,
    };
    let metrics = metrics(&args.output)?;
    let goodput = goodput(&args.output.goodput)?;
    let traffic = traffic(&args.traffic)?;
    let save = Save::prepare(&args.output)?;
    let report = runtime.block_on(async {
        let session = Session::open(&args.server, address).await?;
        let workload = workload(&args.dataset, args.server.backend)?;
        let prefix = request_id_prefix(&args.output);
        let (prompts, mut generator) =
            workload.prompts(&session.format, args.num_prompts, args.dataset.seed, &prefix)?;
        session.compare_counts(&prompts[0].text, prompts[0].tokens).await;
        let target = session.target(&args.server, &args.request, &workload);
        let limit = Duration::from_secs(args.server.ready_check_timeout_sec.into());
        if !limit.is_zero()
            && let Err(error) = target.ready(&prompts[0], limit).await
        {
            bail!("the first request was not answered within {} s: {error}", limit.as_secs());
        }
        let concurrency = args.traffic.max_concurrency.map(|most| most as usize);
        let failures = target.warm_up(&prompts[0], args.traffic.num_warmups, concurrency).await;
        if let Some(error) = failures.first() {
            bail!("{} of {} warm-up requests failed: {error}", failures.len(), args.traffic.num_warmups);
        }
        let prompts = repeat(prompts, args.epochs);
        let times = traffic.times(prompts.len(), &mut generator);
        let hash = prompts_hash(&prompts);
        let load = Load { prompts, times, concurrency, probe_rate: args.traffic.probe_request_rate };
        let bar = (!args.output.disable_tqdm).then(|| progress::bar(load.prompts.len() as u64, "requests"));
        let mut done = |_: &Outcome| {
            if let Some(bar) = &bar {
                bar.inc(1);
            }
        };
        let run = target.run(&load, &mut done, interrupted()).await;
        if let Some(bar) = &bar {
            bar.finish_and_clear();
        }
        let settings = Settings {
            backend: backend(args.server.backend).to_owned(),
            label: args.output.label.clone(),
            model: session.model_id.clone(),
            tokenizer: session.tokenizer_id.clone(),
            num_prompts: args.num_prompts,
            traffic,
            concurrency,
            metrics,
            percentiles: args.output.metric_percentiles.clone(),
            goodput,
            metadata: args.output.metadata.clone(),
            environment: session.environment(&hash).await,
        };
        let mut report = Report::new(settings, run, &session.counter());
        report.quality = quality(&load.prompts, &report.run.outcomes);
        anyhow::Ok(report)
    })?;
    print(&report)?;
    save.finish(&report, args.output.save_detailed)?;
    Ok(if report.summary.completed == 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// One thread for everything: requests then begin in the order of the prompts.
pub(crate) fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the client")
}

/// Ready at Ctrl-C.
pub(crate) async fn interrupted() {
    if tokio::signal::ctrl_c().await.is_err() {
        // Without signals a run ends by itself or is killed.
        std::future::pending::<()>().await;
    }
}

fn print(report: &Report) -> anyhow::Result<()> {
    const SHOWN: usize = 10;
    let mut err = anstream::stderr().lock();
    if report.run.stopped {
        writeln!(err, "note: stopped; the table counts what was answered until then")?;
    }
    let failures: Vec<&str> = report.run.outcomes.iter().filter_map(|outcome| outcome.error.as_deref()).collect();
    if !failures.is_empty() {
        writeln!(err, "{} of {} requests failed:", failures.len(), report.run.outcomes.len())?;
        let mut counted: Vec<(&str, usize)> = Vec::new();
        for failure in failures {
            match counted.iter_mut().find(|(known, _)| *known == failure) {
                Some((_, count)) => *count += 1,
                None => counted.push((failure, 1)),
            }
        }
        for (failure, count) in counted.iter().take(SHOWN) {
            writeln!(err, "  {count} x {failure}")?;
        }
        if counted.len() > SHOWN {
            writeln!(err, "  and {} other reasons", counted.len() - SHOWN)?;
        }
    }
    write!(anstream::stdout().lock(), "{}", table(report))?;
    Ok(())
}

/// Where the result goes.
#[derive(Debug)]
enum Save {
    Nowhere,
    /// A file that is known before the run, so that it is refused before the run.
    File(OutputFile),
    Append(PathBuf),
    /// A file named by the result.
    Named(Option<PathBuf>),
}

impl Save {
    fn prepare(args: &OutputArgs) -> anyhow::Result<Self> {
        if !args.save_result && !args.append_result {
            return Ok(Self::Nowhere);
        }
        if let Some(directory) = &args.result_dir {
            std::fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
        }
        let path = args.result_filename.as_ref().map(|name| match &args.result_dir {
            Some(directory) => directory.join(name),
            None => name.clone(),
        });
        Ok(match path {
            None => Self::Named(args.result_dir.clone()),
            Some(path) if args.append_result => {
                append(&path)?;
                Self::Append(path)
            }
            Some(path) => Self::File(OutputFile::prepare(&path)?),
        })
    }

    fn finish(self, report: &Report, detailed: bool) -> anyhow::Result<()> {
        let json = report.json(detailed);
        match self {
            Self::Nowhere => Ok(()),
            Self::File(file) => file.finish_json(&json),
            Self::Named(directory) => {
                let path = directory.unwrap_or_default().join(report.file_name());
                OutputFile::prepare(&path)?.finish_json(&json)?;
                writeln!(anstream::stderr(), "result: {}", path.display())?;
                Ok(())
            }
            Self::Append(path) => {
                let mut line = serde_json::to_string(&json)?;
                line.push('\n');
                let failed = || format!("cannot append to {}", path.display());
                append(&path)?.write_all(line.as_bytes()).with_context(failed)
            }
        }
    }
}

fn append(path: &Path) -> anyhow::Result<std::fs::File> {
    let opened = OpenOptions::new().create(true).append(true).open(path);
    opened.with_context(|| format!("cannot append to {}", path.display()))
}

/// A server that was asked who it is, and the tokenizer of its model.
pub(crate) struct Session {
    pub(crate) client: Arc<Client>,
    pub(crate) format: Arc<ChatFormat>,
    /// Name of the model in requests.
    model: String,
    pub(crate) model_id: String,
    pub(crate) tokenizer_id: String,
}

impl Session {
    pub(crate) async fn open(args: &ServerArgs, address: Address) -> anyhow::Result<Self> {
        let client = client(address, &args.header, args.ca_file.as_deref())?;
        let (model, model_id) = match &args.model {
            Some(name) => (args.served_model_name.clone().unwrap_or_else(|| name.clone()), name.clone()),
            None => {
                let card = first_model(&client).await?;
                (args.served_model_name.clone().unwrap_or(card.id), card.root)
            }
        };
        let (format, tokenizer_id) = tokenizer(args.tokenizer.as_deref(), &model_id)?;
        Ok(Self { client, format: Arc::new(format), model, model_id, tokenizer_id })
    }

    pub(crate) fn target(&self, server: &ServerArgs, request: &RequestArgs, workload: &Workload) -> Target {
        let (api, path) = match server.backend {
            Backend::Openai => (Api::Completions, "/v1/completions"),
            Backend::OpenaiChat => (Api::Chat, "/v1/chat/completions"),
        };
        let ask = Ask {
            api,
            endpoint: server.endpoint.clone().unwrap_or_else(|| path.to_owned()),
            model: self.model.clone(),
            ignore_eos: request.ignore_eos || workload.ignores_eos(),
            logprobs: request.logprobs,
            extra: extra(request),
            timeout: Duration::from_secs_f64(server.request_timeout_sec),
        };
        Target { client: Arc::clone(&self.client), ask: Arc::new(ask) }
    }

    /// Warns when the server cuts the prompt into another number of tokens.
    pub(crate) async fn compare_counts(&self, text: &str, tokens: usize) {
        if let Some(count) = token_count(&self.client, &self.model, text).await.filter(|&count| count != tokens) {
            let warning = format!(
                "the server counts {count} tokens in the first prompt, {} {tokens}: lengths are not what was asked for",
                self.tokenizer_id
            );
            crate::failure::warn(&[warning]);
        }
    }

    /// Counts the tokens of an answer.
    pub(crate) fn counter(&self) -> impl Fn(&str) -> usize {
        let format = Arc::clone(&self.format);
        move |text: &str| format.tokenizer().encode(text).map_or(0, |ids| ids.len())
    }

    /// What one must know to compare this result with another one.
    pub(crate) async fn environment(&self, prompts: &str) -> Map<String, Value> {
        let flags: Vec<String> = std::env::args().skip(1).collect();
        let value = json!({
            "client": concat!("glimmer ", env!("CARGO_PKG_VERSION")),
            "server_version": version(&self.client).await,
            "base_url": self.client.address().to_string(),
            "client_hardware": hardware(),
            "flags": redacted(&flags),
            "prompts_sha256": prompts,
        });
        value.as_object().cloned().unwrap_or_default()
    }
}

/// Processor and number of cores that this process may use.
pub(crate) fn hardware() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")).and_then(|rest| rest.split(':').nth(1));
    format!("{} cores, {}", open::threads(None), name.map_or(std::env::consts::ARCH, str::trim))
}

/// Flags without the values of headers, which may be keys.
fn redacted(flags: &[String]) -> Vec<String> {
    let mut header = false;
    let mut hide = |flag: &String| {
        if flag.starts_with("--") {
            header = flag.starts_with("--header");
        }
        match flag.find('=').filter(|_| header && flag != "--header") {
            Some(_) if flag.starts_with("--") => "--header=...".to_owned(),
            Some(at) => format!("{}=...", &flag[..at]),
            None => flag.clone(),
        }
    };
    flags.iter().map(&mut hide).collect()
}

/// A client that sends the key of the environment, if any, and the headers that were given, and trusts who it should.
pub(crate) fn client(
    address: Address,
    given: &[(String, String)],
    ca_file: Option<&Path>,
) -> anyhow::Result<Arc<Client>> {
    let client = Client::new(address, headers(given)?);
    Ok(Arc::new(match ca_file {
        Some(file) => client.trusting("--ca-file", file)?,
        None => client,
    }))
}

/// Headers of every request: the key of the environment, if any, and those that were given.
fn headers(given: &[(String, String)]) -> anyhow::Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    if let Ok(key) = std::env::var("OPENAI_API_KEY") {
        let value = HeaderValue::from_str(&format!("Bearer {key}"));
        headers.insert(AUTHORIZATION, value.context("OPENAI_API_KEY is no text for a header")?);
    }
    for (name, value) in given {
        let wrong = || format!("--header {name}=...: not a header");
        headers.insert(
            HeaderName::from_bytes(name.as_bytes()).with_context(wrong)?,
            HeaderValue::from_str(value).with_context(wrong)?,
        );
    }
    Ok(headers)
}

/// The tokenizer of a directory; of the embedded model where the server serves that.
fn tokenizer(given: Option<&str>, model: &str) -> anyhow::Result<(ChatFormat, String)> {
    let name = given.unwrap_or(model);
    let directory = Path::new(name);
    if directory.join("tokenizer.json").is_file() {
        let tokenizer = Tokenizer::from_dir(directory)?;
        let template = match directory.join("chat_template.jinja").is_file() {
            true => ChatTemplate::from_dir(directory)?,
            false => ChatTemplate::new("{{ messages[-1]['content'] }}")?,
        };
        return Ok((ChatFormat::new(tokenizer, template), name.to_owned()));
    }
    if name == "embedded" {
        let checkpoint = open::embedded_model()?;
        let file = |name: &str| {
            let file = checkpoint.file(name).with_context(|| format!("the embedded model has no {name}"))?;
            anyhow::Ok(file.as_slice().to_vec())
        };
        let template = String::from_utf8(file("chat_template.jinja")?)?;
        let tokenizer = Tokenizer::from_bytes(&file("tokenizer.json")?)?;
        return Ok((ChatFormat::new(tokenizer, ChatTemplate::new(&template)?), name.to_owned()));
    }
    bail!(
        "{name:?} is no directory with a tokenizer.json here; name one by --tokenizer, its tokens are what prompts are made of"
    );
}

fn extra(args: &RequestArgs) -> Map<String, Value> {
    let numbers = [
        ("top_p", args.top_p.map(Value::from)),
        ("top_k", args.top_k.map(Value::from)),
        ("min_p", args.min_p.map(Value::from)),
        ("temperature", args.temperature.map(Value::from)),
        ("frequency_penalty", args.frequency_penalty.map(Value::from)),
        ("presence_penalty", args.presence_penalty.map(Value::from)),
        ("repetition_penalty", args.repetition_penalty.map(Value::from)),
    ];
    let given = numbers.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
    given.chain(args.extra_body.clone().unwrap_or_default()).collect()
}

pub(crate) fn workload(args: &DatasetArgs, backend: Backend) -> anyhow::Result<Workload> {
    if args.dataset_path.is_some() && args.dataset_name != DatasetName::Custom {
        bail!("--dataset-path goes with --dataset-name custom only");
    }
    Ok(match args.dataset_name {
        DatasetName::Random => Workload::Random(RandomShape {
            input: args.input_len.unwrap_or(args.random_input_len),
            output: args.output_len.unwrap_or(args.random_output_len),
            prefix: args.random_prefix_len,
            input_ratio: args.random_range_ratio.0,
            output_ratio: args.random_range_ratio.1,
        }),
        DatasetName::PrefixRepetition => Workload::Repetition(RepetitionShape {
            prefix: args.prefix_repetition_prefix_len,
            suffix: args.prefix_repetition_suffix_len,
            prefixes: args.prefix_repetition_num_prefixes,
            output: args.output_len.unwrap_or(args.prefix_repetition_output_len),
        }),
        DatasetName::Custom => {
            let path = args.dataset_path.as_deref().context("--dataset-name custom needs --dataset-path FILE")?;
            Workload::Custom {
                file: path.display().to_string(),
                text: open::text(path)?,
                options: CustomOptions {
                    output: args.output_len.unwrap_or(args.custom_output_len),
                    in_order: args.disable_shuffle,
                    template: backend == Backend::Openai && !args.skip_chat_template,
                    variables: args.chat_template_kwargs.clone().unwrap_or_default(),
                },
            }
        }
    })
}

fn traffic(args: &TrafficArgs) -> anyhow::Result<Traffic> {
    let ramp = args.ramp_up_strategy.zip(args.ramp_up_start_rps.zip(args.ramp_up_end_rps));
    let ramp = ramp.map(|(shape, (from, to))| Ramp { shape: shape.into(), from, to });
    let traffic = Traffic { rate: args.request_rate, burstiness: args.burstiness, ramp };
    traffic.check()?;
    Ok(traffic)
}

pub(crate) fn metrics(args: &OutputArgs) -> anyhow::Result<Vec<Metric>> {
    let find = |name: &String| {
        let known = Metric::ALL.into_iter().find(|metric| metric.key() == name.trim());
        known.with_context(|| {
            format!("--percentile-metrics: {name:?} is none of {}", Metric::ALL.map(Metric::key).join(", "))
        })
    };
    args.percentile_metrics.iter().map(find).collect()
}

fn goodput(given: &[String]) -> anyhow::Result<Option<Goodput>> {
    let mut limits = Goodput::default();
    for text in given {
        let wrong = || format!("--goodput {text}: expected ttft:MS, tpot:MS or e2el:MS with milliseconds from 0");
        let (name, limit) = text.split_once(':').with_context(wrong)?;
        let limit = limit.parse::<f64>().ok().filter(|&limit| limit >= 0.0).with_context(wrong)?;
        let slot = match name {
            "ttft" => &mut limits.ttft,
            "tpot" => &mut limits.tpot,
            "e2el" => &mut limits.e2el,
            _ => bail!(wrong()),
        };
        *slot = Some(limit);
    }
    Ok((!given.is_empty()).then_some(limits))
}

pub(crate) fn backend(backend: Backend) -> &'static str {
    match backend {
        Backend::Openai => "openai",
        Backend::OpenaiChat => "openai-chat",
    }
}

fn request_id_prefix(args: &OutputArgs) -> String {
    args.request_id_prefix.clone().unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros());
        format!("bench-{now:x}-")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_do_not_get_into_results() {
        let flags = ["bench", "--header", "Authorization=Bearer x", "a=b", "--header=k=v", "--metadata", "tp=1"];
        let shown = redacted(&flags.map(str::to_owned));
        assert_eq!(shown, ["bench", "--header", "Authorization=...", "a=...", "--header=...", "--metadata", "tp=1"]);
    }

    #[test]
    fn limits_are_read_by_name() {
        let limits = goodput(&["ttft:200".to_owned(), "e2el:1e3".to_owned()]).unwrap().unwrap();
        assert_eq!((limits.ttft, limits.tpot, limits.e2el), (Some(200.0), None, Some(1000.0)));
        for wrong in ["ttft", "itl:3", "tpot:-1", "tpot:x"] {
            assert!(goodput(&[wrong.to_owned()]).unwrap_err().to_string().contains(wrong));
        }
        assert_eq!(goodput(&[]).unwrap(), None);
    }
}
