//! Arguments of `plan`: its own, and everything that `serve` takes.

use crate::flags::FlagError;

/// What `plan` is asked besides the flags of `serve`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanRequest {
    /// Bytes of one device, where the user says so.
    pub device_bytes: Option<u64>,
    /// Bytes of this machine's memory, all and free, where they are known.
    pub host_bytes: Option<(u64, u64)>,
    /// Plan for the W4A16 artifact of a BF16 checkpoint.
    pub as_w4a16: bool,
    /// Print JSON.
    pub json: bool,
    /// Add the pool that vLLM would make.
    pub like_vllm: bool,
    /// Blocks of a request that a separate drafter takes there.
    pub drafter_blocks: u64,
    /// Bytes of a block there, where they do not follow from the layout.
    pub block_bytes: Option<u64>,
}

/// Help on the arguments that are not those of `serve`.
pub const HELP: &str = "\
  --device-memory GIB     memory of one device in GiB (default: an H200's 140; on the CPU, this machine's)
  --as-w4a16              plan for the W4A16 artifact of a BF16 checkpoint
  --like-vllm             add the pool that vLLM would make of the same cache (see --kv-cache-memory-bytes)
  --drafter-blocks N      blocks of a request that a separate drafter takes there (default 0)
  --block-bytes N         bytes of a block there, where they do not follow from the layout
  --json                  print JSON
";

impl PlanRequest {
    /// Takes its own arguments out of the list; what is left are flags of `serve`.
    ///
    /// # Errors
    /// [`FlagError::Usage`] where a value is missing or is no number.
    pub fn take(arguments: &[String]) -> Result<(Self, Vec<String>), FlagError> {
        let mut request = Self::default();
        let mut rest = Vec::new();
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            let (name, inline) = match argument.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (argument.as_str(), None),
            };
            let mut number = || {
                let text = inline.clone().or_else(|| arguments.next().cloned());
                let number = text.as_ref().and_then(|text| text.parse::<f64>().ok());
                let number = number.filter(|number| number.is_finite() && *number >= 0.0);
                number.ok_or_else(|| {
                    let found = text.as_deref().unwrap_or("nothing");
                    FlagError::Usage(format!("{name} takes a number from 0 up, found {found}"))
                })
            };
            match name {
                "--device-memory" => request.device_bytes = Some((number()? * super::GIB) as u64),
                "--drafter-blocks" => request.drafter_blocks = number()? as u64,
                "--block-bytes" => request.block_bytes = Some(number()? as u64),
                "--as-w4a16" => request.as_w4a16 = true,
                "--like-vllm" => request.like_vllm = true,
                "--json" => request.json = true,
                _ => rest.push(argument.clone()),
            }
        }
        Ok((request, rest))
    }
}
