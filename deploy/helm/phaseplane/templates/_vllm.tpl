{{- /* vLLM beside the agent, as a container that stops after it: our connector is copied in, its image is as it comes.
Same user as the agent, whose memory it maps; the agent's socket is in a folder of that user alone. */ -}}
{{- define "phaseplane.vllm" -}}
{{- $values := .root.Values }}
{{- $connector := dict "kv_connector" "PhaseplaneConnector" "kv_connector_module_path" "nodes.engines.vllm.connector" "kv_role" "kv_both" "kv_load_failure_policy" "recompute" "kv_connector_extra_config" (dict "socket" "/run/phaseplane/link/kv.sock") }}
- name: connector
  image: {{ include "phaseplane.image" .root }}
  {{- include "phaseplane.container" .root | nindent 2 }}
  command: [/opt/phaseplane/connector.sh, /connector, /run/phaseplane/link]
  resources:
    requests: {cpu: 100m, memory: 64Mi}
    limits: {memory: 128Mi}
  volumeMounts:
    - {name: connector, mountPath: /connector}
    - {name: run, mountPath: /run/phaseplane}
- name: vllm
  restartPolicy: Always
  image: {{ $values.vllm.image.repository }}:{{ $values.vllm.image.tag }}
  {{- include "phaseplane.container" .root | nindent 2 }}
  command:
    - vllm
    - serve
    - {{ .one.model | default $values.model.name | quote }}
    - --host=127.0.0.1
    - --port={{ .one.vllmPort }}
    - --dtype={{ $values.model.dtype }}
    - --block-size={{ $values.model.blockSize }}
    - --generation-config=vllm
    - --scheduling-policy=priority
    - --no-async-scheduling
    - --disable-uvicorn-access-log
    {{- if gt (int .one.gpus) 1 }}
    - --tensor-parallel-size={{ .one.gpus }}
    {{- end }}
    - --kv-transfer-config={{ toJson $connector }}
    {{- range .one.vllmArgs }}
    - {{ . | quote }}
    {{- end }}
  env:
    - {name: PYTHONPATH, value: /connector}
    - {name: HOME, value: /tmp}
    - {name: USER, value: phaseplane}
    - {name: HF_HUB_OFFLINE, value: "1"}
    - {name: VLLM_NO_USAGE_STATS, value: "1"}
    {{- range $name, $value := $values.vllm.env }}
    - {name: {{ $name }}, value: {{ $value | quote }}}
    {{- end }}
  {{- if .one.hostNetwork }}
  ports: # so that no other pod with this port comes to the machine
    - {containerPort: {{ .one.vllmPort }}}
  {{- end }}
  resources:
    requests: {cpu: {{ .one.cpu | quote }}, memory: {{ include "phaseplane.gib" .one.memoryGib }}}
    limits: {{ merge (dict "memory" (include "phaseplane.gib" (addf .one.memoryGib $values.vllm.shmGib))) .gpus | toJson }}
  volumeMounts:
    - {name: connector, mountPath: /connector, readOnly: true}
    - {name: run, mountPath: /run/phaseplane}
    - {name: shm, mountPath: /dev/shm}
    - {name: vllm-tmp, mountPath: /tmp}
    {{- if $values.model.volume }}
    - {name: models, mountPath: /models, readOnly: true}
    {{- end }}
{{- end }}
